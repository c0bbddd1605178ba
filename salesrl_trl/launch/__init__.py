"""A whole run around the trainer: its rows, services, settings and checks, its process, and its evaluations.

- `train`, `env`, `translate`, `preflight`, `evaluate`: the commands. `train` decides the order of a run.
- `settings`, `recipes`, `presets`, `*_config`: from a recipe and a command line to settings.
- `checks`, `memory`: checks before a model is loaded, a card's memory.
- `services_plan`, `plan`: what is made of settings without a model's weights.
- `assembly`, `building`: from settings to the reward chain, and to the trainer.
- `data`, `evaluation`: from files to rows; figures of held-out rows.
- `console`, `signals`, `process`, `last_words`, `catalogue`: the process of a run, and what it says at its end.
- `commands`, `software`, `banner`, `run_record`: what commands have in common, and what a run's folder keeps.
"""
