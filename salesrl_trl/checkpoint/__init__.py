"""Checkpoints: whole or not there, and of which run.

- `keeper`: saves them, with the package's own files beside those of transformers.
- `whole`: the manifest, and which folder is a whole checkpoint.
- `resume`, `identity`: the one that a run goes on from, and the inputs on which it depends.
- `under_way`: the generation batch under way.

Refuses to decide when a checkpoint is written: transformers does.
"""
