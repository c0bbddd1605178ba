"""The trainer's parts, and how they get what they use of TRL's trainer. Refuses to override anything: `trainer` does.

- `components`: builds the parts, says which part gets which, and describes what they use of TRL (`Hooks`).
- `trl_access`: the trainer below the overrides, which makes `Hooks`.
- `banner_lines`, `recorder`: what a run says of itself at its start, and its record.
- `policy`, `overrides`: the policy while TRL builds its trainer, and overrides that some objects do without.
"""
