"""Run viewer: completions in a browser (`viewer`, `page`, `queries`, `record_index`) and charts on one page
(`salesrl_trl.record.report`).

Imports neither torch nor TRL. Never writes to a run's record, listens on loopback only, and uses no other network.
"""
