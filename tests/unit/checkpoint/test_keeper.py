"""What a checkpoint can hold of rows in flight."""

import datetime

from datasets import Dataset

from salesrl_trl.checkpoint.keeper import why_not_kept


def test_rows_that_a_checkpoint_cannot_hold_leave_groups_in_order():
    day = datetime.date(2026, 11, 27)
    assert why_not_kept(Dataset.from_list([{"prompt": "a", "parts": [{"n": 1, "x": b"y"}], "none": None}])) is None
    assert "dates" in why_not_kept(Dataset.from_list([{"prompt": "a", "day": day}]))
