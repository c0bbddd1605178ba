"""Stages that check whether a run can work, by cost. A run executes all but the last, which loads the model."""
