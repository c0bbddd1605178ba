"""A whole run around the trainer: its rows, services, settings and checks, its process, and its evaluations.

- `train`, `env`, `translate`, `preflight`, `evaluate`: the commands. `train` decides the order of a run.
- `settings`, `recipes`, `presets`, `*_config`: from a recipe and a command line to settings.
- `checks`, `memory_estimate`: checks before a model is loaded, a card's memory.
- `services_plan`, `plan`: what is made of settings without a model's weights, the embedded services, and the trainer.
- `assembly`: from settings to the reward chain.
- `data`, `evaluation`: from files to rows; figures of held-out rows.
- `console`, `signals`, `process`: the process of a run, and what it says at its end.
- `software`, `banner`, `run_record`: what a run has under it, tells at its start, and keeps in its folder.
"""
