"""Evaluates the policy on held-out rows during training: quick and full evaluations."""
