"""Rollouts in flight: which prompts come next, when their completions may be generated, and when they are trained on.

Owns the order of prompts, the schedule, the pipeline that starts rewards early and collects them late, a batch's way
through TRL's scoring (`scoring`, `groups`), and the policy as the subject of quick evaluations (`greedy`). Refuses to
score a completion: `reward` does.
"""
