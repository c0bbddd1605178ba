"""The policy's quality on held-out rows, while training goes on: quick evaluations, full ones, and their statistics.

Refuses to generate, to score and to know the trainer: answers and their rewards come from a `Subject`. The trainer's
parts (`wiring`) call it, and `python -m salesrl_trl.launch.evaluate` uses its statistics.
"""
