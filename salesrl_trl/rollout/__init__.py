"""Rollouts in flight: which prompts come next, when their completions may be generated, and when they are trained on.

Owns the schedule, the order of prompts, and the pipeline that starts rewards early and collects them late. Refuses to
compute a reward or an advantage.
"""
