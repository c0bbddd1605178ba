"""A recorded run, judged again: answers from the record, verdicts from another judge or by other weights.

`__main__` has the command line, `rejudging` judges again and writes a new record, `score_changes` says what another
judge would have changed.
"""
