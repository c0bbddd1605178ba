"""A run's completions to look at: `python -m salesrl_trl.view RUN [RUN ...]`.

- `index` follows the records of the runs, `haystack` holds their texts for a search;
- `queries` answers for lists, figures and comparisons, `detail` for one completion's whole way;
- `page` puts the page together (its scripts and style are in `assets`), `server` serves it, `alone` makes one that
  needs no server.

Imports neither torch nor TRL. Refuses to write into a run, to listen beyond loopback, and to ask the network.
"""
