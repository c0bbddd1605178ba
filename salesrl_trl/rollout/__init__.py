"""Rollouts in flight: which prompts come next, when they are generated, and when they are trained on."""
