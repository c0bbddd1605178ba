"""The deadline that travels with tasks."""

import asyncio
import math

from salesrl_trl.reward.service.deadline import deadline, remaining_s


def test_without_a_deadline_there_is_all_the_time():
    assert remaining_s() == math.inf


def test_a_task_takes_the_deadline_along_and_its_neighbour_another():
    async def left():
        await asyncio.sleep(0)
        return remaining_s()

    async def both():
        with deadline(5.0):
            first = asyncio.create_task(left())
        with deadline(50.0):
            second = asyncio.create_task(left())
        return await asyncio.gather(first, second, left())

    first, second, outside = asyncio.run(both())
    assert 4.5 < first <= 5.0
    assert 49.5 < second <= 50.0
    assert outside == math.inf


def test_an_inner_deadline_cannot_prolong_an_outer_one():
    with deadline(1.0), deadline(10.0):
        assert remaining_s() <= 1.0


def test_nothing_is_left_after_it():
    with deadline(-1.0):
        assert remaining_s() == 0.0
