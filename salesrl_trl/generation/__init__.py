"""From a prompt to tokens.

- `sampler`: the protocol of a generation engine, and TRL's engines behind it.
- `vllm`, `requests`, `merging`: what differs from TRL's generation with vLLM.
- `compiled`: the folder of compiled code.

Refuses to know what the tokens are for: no reward, no KL, no schedule. The trainer's parts (`wiring`) build a sampler,
and `rollout` calls it.
"""
