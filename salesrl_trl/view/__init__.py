"""A run to look at: its completions in a browser (`python -m salesrl_trl.view`), its figures on one page
(`python -m salesrl_trl.report`).

`record_index` follows the records, `queries` answers, `page` and `viewer` show. `run_folder` reads a run's folder,
`run_figures` and `advice` compute, `charts` and `report_page` show. Imports neither torch nor TRL. Writes into no
run's record, listens on loopback alone, asks no network.
"""
