"""Around the trainer: all of a run that happens before its first step and after its last one.

- `settings`, `yaml_file`: from a recipe and a command line to settings.
- `checks`, `precision`: checks before a model is loaded, the weights' number format.
- `memory`, `presets`: the estimate of a card's memory; overlays of a recipe.
- `preflight`: these checks as stages, in their order.
- `assembly`, `building`: from settings to the reward chain, and to the trainer.
- `last_words`, `catalogue`, `fault`, `launcher`: what a failed run says at its end, and its exit code.
- `signals`: what a signal does to a run, and the death of its launcher.
- `software`, `record`: the code and versions of a run, and what its folder keeps of them and of its settings.
- `rollouts_only`: the trainer that updates nothing.
- `banner`, `console`: the lines at the start, the log file, and how the process ends.
- `simulation`: the load of a run on its services, without a run.

Refuses to decide the order of a run: `train` does.
"""
