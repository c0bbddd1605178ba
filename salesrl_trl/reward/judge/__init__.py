"""Verdicts from LLM judges.

- `judge_interface`: what the chain asks of a judge.
- `judge_client`: the order of several providers, with repeats.
- `provider`: the request to one provider, and its cost.
- `verdict`: what a judge is shown, and what counts as a verdict.
- `noise`: how far verdicts on the same answer differ.

Refuses to turn a verdict into a reward: `reward.scoring` does. The reward chain calls it.
"""
