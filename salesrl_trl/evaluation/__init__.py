"""The policy's quality on held-out rows, while training goes on.

- `quick`: quick evaluations: their steps, their rows, and the folder of the best policy.
- `subject`: what a quick evaluation needs of a trainer, and the ranks.
- `quick_figures`, `quick_record`: figures of a quick evaluation, and their record.
- `held_out`: the list of the full evaluations of held-out rows.
- `row_statistics`: means over rows with their intervals, and the evaluations that no other one beats.

Refuses to generate, to score and to know the trainer: answers and their rewards come from a `Subject`. The trainer's
parts (`wiring`) call it, and `python -m salesrl_trl.evaluate` uses its statistics.
"""
