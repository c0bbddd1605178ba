"""Checkpoints: whole or not there, and of which run.

- `keeper`: saves them, with the package's own files beside those of transformers, and chooses the one to go on from.
- `whole`: the manifest, and which folder is a whole checkpoint.
- `identity`: the inputs on which a checkpoint depends.

Refuses to decide when a checkpoint is written: transformers does. The trainer calls `keeper`.
"""
