"""Evaluates existing policies through a run's own path, without training."""
