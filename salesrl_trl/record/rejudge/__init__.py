"""Judges a recorded run again: answers from the record, verdicts from another judge or with other weights."""
