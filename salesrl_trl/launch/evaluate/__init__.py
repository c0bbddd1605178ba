"""The evaluation of policies that are there already, by a run's own path, without training.

`__main__` calls, in this order, `policies`, `answering`, `findings` and `evaluation_text`.
"""
