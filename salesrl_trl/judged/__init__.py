"""Verdicts from LLM judges: who is asked (`judge`, `provider`), what the judge sees and answers (`verdict`).

`scoring` alone turns verdicts into rewards; the reward pipeline calls it.
"""
