"""Checkpoints: whole or not there, and of which run. transformers decides when one is written.

- `keeper`: saves them, with the package's own files, and has all ranks choose the same one to go on from.
- `whole`: the manifest, and which folder is a whole checkpoint.
- `identity`: the inputs on which a checkpoint depends.
- `fitted`: what of an optimizer and its schedule fits a run with other settings.
"""
