"""Sends each group's prompt through the model once, followed by its completions."""
