"""Checks before a model's weights are loaded, one module per subject, for runs and preflights."""
