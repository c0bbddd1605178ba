"""The evaluation of policies that are there already, by a run's own path, without training.

`__main__` has the command line. It calls, in this order, `policies` (where they lie, and the settings in which an
evaluation differs from a run), `answering` (the answers, with their rewards), `findings` (the figures, and the
comparison of two policies) and `evaluation_text`. Refuses to own the statistics: `evaluation.comparison` does.
"""
