"""A recorded run, judged again: answers from the record, verdicts from another judge or by other weights.

- `__main__` has the command line, `rejudging` judges again and writes a new record;
- `answers` is the RAG service of a record, `comparison` says what another judge would have changed.
"""
