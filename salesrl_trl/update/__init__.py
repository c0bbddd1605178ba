"""From rewards to an optimizer step: advantages, logged metrics, skipped batches, and stopping."""
