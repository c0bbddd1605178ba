"""The evaluation of policies that are there already, by a run's own path, without training."""
