"""The memory that training takes on a card, estimated from figures, before a model is loaded.

- `shape`: the figures of a model, from its configuration.
- `setup`: the settings of a run that decide the memory.
- `estimate`: the memory at four moments of a step, by parts, and what takes less; `activations`: one part of it.
- `cards`: the memory of a card, and the processes that use it now.

`preflight.memory` calls them: for each run, and for `scripts/check_gpu_memory.py`. An estimate is good to about 10 %;
the stage `step` of preflight measures.
"""
