"""A recorded run, judged again: answers from the record, verdicts from another judge or by other weights."""
