"""Atomic checkpoints and the identity of their run. transformers decides when one is written."""
