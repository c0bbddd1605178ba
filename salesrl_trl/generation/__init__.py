"""From a prompt to tokens. Refuses to know what the tokens are for: no reward, no KL, no schedule."""
