"""From files and datasets to the rows of a run."""
