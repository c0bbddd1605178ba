"""The trainer's components and parts, and how they get what they use of TRL's trainer, which `trainer` overrides."""
