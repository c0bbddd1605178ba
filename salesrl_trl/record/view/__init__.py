"""A run to look at: completions in a browser (`viewer`, `page`, `queries`, `record_index`), figures on one page
(`salesrl_trl.record.report`).

Imports neither torch nor TRL. Writes into no run's record, listens on loopback alone, asks no network.
"""
