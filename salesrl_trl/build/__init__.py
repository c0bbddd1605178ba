"""From a command line to a trainer: all of a run that happens before its first step.

- `settings`, `yaml_file`, `recipes`, `presets`: from a recipe and a command line to settings.
- `checks`, `memory`: checks before a model is loaded, a card's memory.
- `services_plan`, `plan`: the parts that are made of settings without a model's weights.
- `assembly`, `building`: from settings to the reward chain, and to the trainer.
- `software`, `read_ahead`, `banner`: versions, files read early, the lines at the start.

Refuses to decide the order of a run: `train` does. `preflight` says which checks run when.
"""
