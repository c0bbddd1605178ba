"""The process of a run: its console, its signals, its end, and what its folder keeps of it.

- `console`: the lines, the log file, and how the process ends.
- `signals`: what a signal does to a run, and the death of its launcher.
- `last_words`, `catalogue`, `launch`: what a failed run says at its end, and its exit code.
- `tools`: what commands have in common, such as the form of a finding.
- `run_record`: what a run's folder keeps of its settings and software.

Recipes and commands call it.
"""
