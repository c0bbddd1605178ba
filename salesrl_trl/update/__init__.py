"""From rewards to an optimizer step.

Owns advantages, skipped batches and the end of a run (`run_control`, `stop_notice`), and whether weights move
(`weights`). Refuses to compute a loss: that is TRL's.
"""
