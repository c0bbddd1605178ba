"""The process of a run: its console, its signals, its end, and what its folder keeps of it.

- `console`: the lines, the log file, and how the process ends.
- `signals`: what a signal does to a run, and the death of its launcher.
- `last_words`, `catalogue`, `fault`, `launcher`: what a failed run says at its end, and its exit code.
- `finding`, `tools`: what a check found, and what commands have in common.
- `run_record`: what a run's folder keeps of its settings and software.
"""
