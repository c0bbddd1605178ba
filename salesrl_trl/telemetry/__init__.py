"""Measurements of a run: time, FLOPs, memory, and the sums between two log lines.

Owns the timeline, the trace, the heartbeat, utilisation and TensorBoard's layout. Refuses to know rewards and KL:
their packages add their own figures.
"""
