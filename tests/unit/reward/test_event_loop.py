"""The deadline that travels with tasks."""

import asyncio
import math

import pytest
from support import virtual_time

from salesrl_trl.service.event_loop import deadline, remaining_s


def test_a_task_takes_the_deadline_along_and_its_neighbour_another():
    async def left():
        await asyncio.sleep(1.0)
        return remaining_s()

    async def both():
        with deadline(5.0):
            first = asyncio.create_task(left())
        with deadline(50.0):
            second = asyncio.create_task(left())
        return await asyncio.gather(first, second, left())

    assert virtual_time.run(both()) == pytest.approx([4.0, 49.0, math.inf])


def test_an_inner_deadline_cannot_prolong_an_outer_one():
    async def left():
        with deadline(1.0), deadline(10.0):
            return remaining_s()

    assert virtual_time.run(left()) == pytest.approx(1.0)
