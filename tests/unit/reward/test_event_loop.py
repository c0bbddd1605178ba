"""The deadline that travels with tasks."""

import pytest
from support import virtual_time

from salesrl_trl.service.event_loop import deadline, remaining_s


def test_an_inner_deadline_cannot_prolong_an_outer_one():
    async def left():
        with deadline(1.0), deadline(10.0):
            return remaining_s()

    assert virtual_time.run(left()) == pytest.approx(1.0)
