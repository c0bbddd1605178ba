"""From rewards to an optimizer step: advantages, figures of a log line, skipped batches, and the end of a run."""
