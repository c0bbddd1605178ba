"""A recorded run, judged again: answers from the record, verdicts from another judge or by other weights.

Owns the command, the answers of the record, and the comparison with what was recorded.
"""
