"""The memory that training takes on a card, estimated from figures, before a model is loaded.

- `shape`: what decides it: the figures of a model, and the settings of a run.
- `estimate`: the memory at four moments of a step, by parts, and what takes less; a card, and what is in use now.

`launch.plan` and `preflight` call them. An estimate is good to about 10 %; the stage `step` measures.
"""
