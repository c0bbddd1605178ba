"""From prompts to tokens, independent of rewards, KL and scheduling."""
