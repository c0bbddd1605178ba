"""The trainer's parts, and how they get what they use of TRL's trainer.

- `components`: builds the parts, says which part gets which, and describes what they use of TRL's trainer (`Hooks`).
- `trl_access`: the trainer below the overrides, which makes `Hooks`.
- `policy`: the policy while TRL builds its trainer.
- `overrides`: puts the overrides of a class out of force for objects that want none.

Refuses to override anything: `trainer` does.
"""
