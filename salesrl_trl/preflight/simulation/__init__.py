"""The load of a training run on a RAG service and a judge, without a model or a GPU.

- `completions`: batches shaped as those of GRPO, with completions good and bad in known ways.
- `findings`, `hints`: from scored batches to figures, faults, and the setting that mends them.
- `text`: the figures as text.
- `command`: its settings, checks and order, for `scripts/simulate_training_rewards.py`.

Refuses to score: the reward chain of training does.
"""
