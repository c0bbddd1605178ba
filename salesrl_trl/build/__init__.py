"""From a command line to a trainer: all of a run that happens before its first step.

- `settings`, `recipes`, `presets`: from a recipe and a command line to settings.
- `checks`, `memory`: checks before a model is loaded, a card's memory.
- `services_plan`, `plan`: the parts that are made of settings without a model's weights.
- `assembly`, `building`: from settings to the reward chain, and to the trainer.
- `software`, `banner`: versions, the lines at the start. `train` decides the order, and `preflight` that of checks.
"""
