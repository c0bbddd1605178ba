"""From rewards to an optimizer step. Refuses to compute a loss: TRL does.

Owns two corrections of TRL's advantages, the figures of a log line, skipped batches, the end of a run that was asked
to stop, decisions that all ranks make together, what it has spent, and the check that weights move.
"""
