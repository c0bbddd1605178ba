"""A group's prompt goes through the model once, and each of its completions behind it."""
