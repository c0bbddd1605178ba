"""The process of a run: its console, its signals, its end, and what its folder keeps of it.

- `console`: the lines, the log file, and the exit code of a process that failed.
- `signals`: what a signal does to a run, and the death of its launcher.
- `last_words`, `catalogue`, `launch`: what a failed run says at its end, and the file with its exit code.
- `tools`: what commands have in common, such as the form of a finding.
- `run_record`: what a run's folder keeps of its settings and software.
"""
