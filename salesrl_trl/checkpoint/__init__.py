"""Checkpoints: whole or not there, and of which run. transformers decides when one is written.

- `keeper`: saves them, with the package's own files, and agrees with all ranks on the one to go on from. The trainer calls it.
- `whole`: the manifest, and which folder is a whole checkpoint.
- `identity`: the inputs on which a checkpoint depends.
"""
