"""Rows, prompts and dataset sources."""
