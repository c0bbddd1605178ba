"""The trainer's components and parts, and their access to TRL's trainer, which `trainer` overrides."""
