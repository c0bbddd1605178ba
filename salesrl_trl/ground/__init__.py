"""What serves every other package, with the standard library alone.

- `own_code`: the package's own files, their commit, and what of them changed since they were imported.
- `process`: memory, files, and the environment of a process.
- `shutdown`: the end of a command, and exit codes. `tables`: tables for a terminal.
- `patched`: attributes of other libraries' objects, replaced for a while.
- `service_keys`: keys of services. `fencing`: the fences around hostile text. `texts`: texts that can be encoded.
- `surroundings`: what a thread that calls a user's code has of the main thread.

Refuses to know anything of the packages above.
"""
