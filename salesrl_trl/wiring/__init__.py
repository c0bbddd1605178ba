"""The trainer's parts, and how they get what they use of TRL's trainer.

- `components`: builds the parts, and says which part gets which.
- `hooks`: what the parts use of TRL's trainer, as values and bound callables.
- `trl_access`: the trainer below the overrides, which makes `hooks`.
- `policy`: the policy while TRL builds its trainer.
- `overrides`: puts the overrides of a class out of force for objects that want none.

Refuses to override anything: `trainer` does.
"""
