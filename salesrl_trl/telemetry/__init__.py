"""Measurements of a run: time, FLOPs, memory, and the sums between two log lines. Rewards and KL add their own
metrics."""
