"""Metric names and how metrics are gathered."""
