"""Checkpoints: whole or not there, and of which run. transformers decides when one is written."""
