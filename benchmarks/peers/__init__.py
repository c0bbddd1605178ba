"""The step of this package beside what a user would pick instead: stock TRL, TRL's AsyncGRPO, verl, Unsloth.

    python -m benchmarks.peers --arms stock ours_2 verl_sync verl_async_2 unsloth --latency 0 0 --latency 5.6 3.2
    python -m benchmarks.peers --shape 3b --full --arms async_1 ours_server_1 ours_server_4    # two GPUs
    python -m benchmarks.peers --shape 1.5b --full --dtype float32 --arms ours_2 pair_2 ours_server_2    # two GPUs
    python -m benchmarks.peers.environment verl /tmp/verl    # builds an arm's environment

- `task` is what all arms share: prompts, lengths, rewards, the count of steps. It needs the standard library alone.
- `trl_arm`, `unsloth_arm`, `verl_arm` and `async_arm` each run one arm, in the environment of that arm.
- `environment` builds an environment from the package index; `environments/` holds the pinned lists.
- `__main__` makes the weights and runs the arms one after the other.

benchmarks/log/2026-11-26-peers.md has the figures and what differs between the arms.
"""
