"""A run's folder as one page: `python -m salesrl_trl.report OUTPUT_DIR`.

- `records` reads the folder;
- `figures` computes the numbers, `words` rounds them, `summary` and `advice` put them into words;
- `plots` draws on `paper`;
- `page` writes HTML and text.

Imports neither torch nor TRL. Refuses to train, to call a service, and to change more of the folder than its two
files.
"""
