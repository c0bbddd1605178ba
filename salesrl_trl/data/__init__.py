"""From a file's record to a `SalesRow` and its chat prompt. `sources` loads the rows; `build` asks for them.

`lengths`, `pictures` and `processor` serve the plan of a run too. Refuses to know services, rewards or a model.
"""
