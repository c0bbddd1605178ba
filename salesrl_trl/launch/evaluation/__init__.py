"""The policy's quality on held-out rows, while training goes on: quick evaluations and full ones."""
