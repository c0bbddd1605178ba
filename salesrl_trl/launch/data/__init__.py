"""Converts a file's records to the rows and chat prompts of a run."""
