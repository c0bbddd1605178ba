"""Around the trainer: everything of a run that happens before a step and after the last one.

Owns the checks before a model is loaded (`preflight`, `probe`), the reward chain built from settings (`assembly`), the
number format of the weights (`precision`), and the lines that say what a run consists of (`banner`).
"""
