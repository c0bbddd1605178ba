"""The memory that training takes on a card, estimated from figures, before a model is loaded.

- `shape`: the figures of a model, from its configuration.
- `setup`: the settings of a run that decide the memory.
- `estimate`: the memory at each moment of a step, by parts.
- `states`, `activations`, `generation`: a part each, with the source of its formula.
- `remedies`: settings that take less memory, the cheapest first.
- `cards`: the memory of a card, and the processes that use it now.
- `command`: `scripts/check_gpu_memory.py`.

Refuses to load weights, and to change a setting.
"""
