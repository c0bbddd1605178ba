"""A run to look at: its completions in a browser (`python -m salesrl_trl.view`), its figures on one page
(`python -m salesrl_trl.report`).

- The viewer: `record_index` follows the records of the runs; `queries` answers; `page` puts the page together (its
  scripts and style are in `assets`), `viewer` serves it.
- The report: `run_folder` reads a run's folder; `run_figures` computes, `wording` rounds, `advice` says what stands
  out, `charts` draws; `report_page` has what is shown, in its order.

Both write HTML by the files in `templates`. Imports neither torch nor TRL. Refuses to write into a run's record, to
listen beyond loopback, and to ask the network.
"""
