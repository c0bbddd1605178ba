"""Rollouts in flight: which prompts come next, when they may be generated, and when they are trained on.

Owns the order of prompts (`reading_ahead`), rewards that start early (`pipeline`), a batch's way through TRL's scoring
(`rollout_scoring`), and its passes through the model (`model_passes`, `normaliser`).
"""
