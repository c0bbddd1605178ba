"""A run's folder as one page to read: `python -m salesrl_trl.report OUTPUT_DIR`.

`records` reads what the run left behind, `figures` derives the numbers and the advice, `plots` draws, `page` writes
HTML and text. Nothing here trains, asks a service, or changes a run's folder beyond the two files it writes.
"""
