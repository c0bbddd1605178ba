"""A whole run around the trainer: its rows, services, settings and checks, its process, and its evaluations."""
