"""Verdicts from LLM judges.

Owns what a judge is shown and what counts as a verdict (`verdict`), one provider and its cost (`provider`), and the
order of several, with repeats (`judge_client`). Refuses to turn a verdict into a reward: that is `reward.scoring`.
"""
