"""Around the trainer: all of a run that happens before its first step and after its last one.

- `settings`: from a recipe and a command line to settings.
- `checks`, `preflight`, `precision`: checks before a model is loaded, their order, the weights' number format.
- `assembly`, `building`: from settings to the reward chain, and to the trainer.
- `banner`, `console`: the lines at the start, the log file, and how the process ends.
- `simulation`: the load of a run on its services, without a run.

Refuses to decide the order of a run: `train` does.
"""
