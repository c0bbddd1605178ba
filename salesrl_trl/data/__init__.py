"""From a file's record to a `SalesRow` and its chat prompt. `sources` uses all other modules here.

Refuses to know services, rewards or a model. The checks before a run (`build`) call it.
"""
