"""Rollouts in flight: which prompts come next, when their completions may be generated, and when they are trained on.

Owns the order of prompts and what is read ahead (`reading_ahead`), rewards that start early and are collected late
(`pipeline`), a batch's way through TRL's scoring (`rollout_scoring`, `groups`), and the policy as the subject of quick
evaluations (`greedy`). Refuses to score a completion: `reward` does.
"""
