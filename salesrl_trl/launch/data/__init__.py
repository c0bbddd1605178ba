"""From a file's record to the rows and the chat prompts of a run."""
