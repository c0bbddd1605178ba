"""From rewards to an optimizer step.

Owns two corrections of TRL's advantages (`advantages`), the figures of a log line (`ledger`), skipped batches
(`run_control`), the end of a run that was asked to stop (`stopping`), decisions that all ranks make together
(`ranks`), and the check that weights move (`weights`). Refuses to compute a loss: TRL does.
"""
