"""Can this run work? Stages in order of cost: checks of `launch.checks`, then what only the command tries out.

- `stage`, `runner`: a list of checks under one name with its report; the list of the stages, and their order.
- `services`, `load`: the stages `rag` and `judge`, and the load of a step on a service.
- `memory`: the stage of this name. `training`, `rehearsal`: the stages `model`, `engine` and `step`.
- `scored_load`, `made_up`: made-up completions, scored by the reward chain of training.

A run passes the same stages, up to the first that loads a model.
"""
