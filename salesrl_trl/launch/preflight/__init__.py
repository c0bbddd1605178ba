"""Can this run work? Stages in order of cost: checks of `launch.checks`, then what only the command tries out.

A run passes the same stages, up to the one that loads the model.
"""
