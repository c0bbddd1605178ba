"""The trainer's components and parts, and how they get what they use of TRL's trainer. Refuses to override anything:
`trainer` does.

- `components`: builds the components and says which one gets which.
- `hooks`, `trl_access`: what they use of TRL, and the trainer below the overrides, which makes it.
- `part`: the interface of a part, and which settings ask for which. It loads layers by name.
- `policy`: the policy while TRL builds its trainer.
"""
