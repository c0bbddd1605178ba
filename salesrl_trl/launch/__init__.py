"""A complete run around the trainer: data, services, settings, checks, process, and evaluations."""
