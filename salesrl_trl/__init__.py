"""salesrl_trl: GRPO for policies that are scored by slow, real RAG services and judges, on TRL."""

__version__ = "0.1.0"
