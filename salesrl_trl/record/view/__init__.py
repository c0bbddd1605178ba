"""A run to look at: completions in a browser (`viewer`, `page`, `queries`, `record_index`), figures on one page
(`report_page`, `charts`, `run_figures`, `run_folder`). Called by the commands `view` and `report`.

Imports neither torch nor TRL. Writes into no run's record, listens on loopback alone, asks no network.
"""
