"""Checks before a model's weights are loaded: one module for each subject, called by a run and by a preflight."""
