"""From rewards to an optimizer step.

Owns advantages, the figures of a log line (`ledger`), skipped batches and the end of a run (`run_control`,
`stop_notice`), and the check that weights move (`weights`). Refuses to compute a loss: TRL does.
"""
