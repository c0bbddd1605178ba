"""Checks before a model's weights are loaded: one module for each subject, called by a run and by a preflight.

- `outcome`: the form of what a check finds.
- `environment`: versions, GPUs, disk, memory, locks; `folders`: the output folder with its lock.
- `dataset`: rows, the prompt's template, the room for prompt and completion.
- `model`: the policy's configuration, tokenizer and attention.
- `reward`: rubrics, weights, keys and stand-ins; `addresses` asks what answers at its services' addresses.

`launch.preflight.runner` decides the order. A setting by itself is checked in `config`, a row in `data`.
"""
