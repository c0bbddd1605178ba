"""Rollouts in flight: which prompts are next, when they are generated, and when they are trained on."""
