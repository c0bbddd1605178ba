"""Verdicts from LLM judges: who is asked (`judge`, `provider`), what is shown and read (`verdict`).

Refuses to turn a verdict into a reward: `scoring` does. The reward chain calls it.
"""
