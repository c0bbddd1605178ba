"""The trainer's components and parts, and how they get what they use of TRL's trainer. Refuses to override anything:
`trainer` does.

- `components`: builds the components and says which one gets which.
- `part`: the interface of a part, which settings ask for which, and what all of them use of TRL (`Hooks`).
- `trl_access`, `trl_generation`: the trainer below the overrides, which makes it.
- `policy`: the policy while TRL builds its trainer.
"""
