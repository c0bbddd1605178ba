"""Calls in flight: the law of their number, when one is late, and which of several requests for a call counts."""

import asyncio
import logging
import random
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from salesrl_trl.errors import DeadlineExceeded, ServiceOverloaded
from salesrl_trl.service.event_loop import deadline, remaining_s
from salesrl_trl.service.flights import (
    CLOSED,
    FALLEN,
    MARGIN,
    MIN_SAMPLES,
    OURS,
    AdaptiveLimit,
    HedgePolicy,
    _Flight,
)
from salesrl_trl.service.transport import Transport


@pytest.mark.parametrize("good", [0, 1, None])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_an_answer_counts_also_where_a_failure_comes_at_the_same_moment(order, good):
    """Both have ended when the first of them is looked at."""
    loop, beside = asyncio.get_running_loop(), []
    answers = [loop.create_future() for _ in range(2)]
    left = iter(answers)

    async def attempt():
        return await next(left)

    flights = SimpleNamespace(failed_beside=lambda error, number: beside.append(number))
    flight = _Flight(attempt, 1, flights)
    flight.send(2)
    await asyncio.sleep(0)
    for place in order:
        if place == good:
            answers[place].set_result("an answer")
        else:
            answers[place].set_exception(ValueError(str(place)))
    if good is None:
        with pytest.raises(ValueError, match=str(order[1])):  # one is told of, the other raised
            await asyncio.wait_for(flight.result, 10)
        assert beside == [order[0] + 1]
    else:
        assert await asyncio.wait_for(flight.result, 10) == "an answer"
        assert flight.won_by_hedge == (good == 1)
        assert beside == ([] if order[0] == good else [order[0] + 1])


@pytest.mark.parametrize(
    ("seconds", "late_after_s"),
    [
        ([1.0] * (MIN_SAMPLES - 1), None),
        ([1.0] * MIN_SAMPLES, MARGIN),
        (range(100), 94 * MARGIN),  # rank 0.95 x 99 = 94.05
        ([20.0 if number % 50 == 49 else 1.0 for number in range(320)], MARGIN),  # 2 % of stragglers do not move it
    ],
    ids=["too few", "enough", "spread", "stragglers"],
)
def test_late_is_a_margin_above_the_95th_percentile_once_enough_is_known(seconds, late_after_s):
    policy = HedgePolicy(0.05)
    for took in seconds:
        policy.record_answer(float(took))
    assert policy.late_after_s == (late_after_s and pytest.approx(late_after_s))


def answer(limit, times, waiting=1000):
    for _ in range(times):
        limit.record_answer(waiting=waiting)


def refuse_above(most, limit, times=8):
    """A service that takes `most` requests at once: of rounds with one more, the last one is refused each time."""
    for _ in range(times):
        *_, above = [limit.record_sent(load) for load in range(1, most + 2)]
        limit.record_overload(above)


def test_refusals_that_come_with_load_lower_the_limit_and_growth_is_slow_from_then_on():
    limit = AdaptiveLimit(20, 100)
    refuse_above(20, limit, times=4)
    # loads 1 to 21, 21 refused: of one round corr x sqrt(n) is 1.6, of two 2.3, of three 2.8, of four 3.3
    assert (limit.slots, limit.cause) == (12, OURS)  # 20 x 0.8 x 0.8
    answer(limit, 13)
    assert limit.slots == 13  # 12.8 and 13 answers of about 1/13


@pytest.mark.parametrize("share", [0.02, 0.2])
def test_refusals_at_random_leave_the_limit_where_it_is_whatever_the_load(share):
    lowered = 0
    for seed in range(40):
        dice, limit = random.Random(seed), AdaptiveLimit(64, 64)
        for _ in range(512):
            sent = limit.record_sent(dice.randint(8, 64))
            if dice.random() < share:
                limit.record_overload(sent)
        lowered += limit.slots < 64
    assert lowered <= 6  # 2.5 standard errors, looked at about five times independently in each of 40 runs


def test_where_most_are_refused_at_any_load_the_limit_falls_and_is_back_as_soon_as_it_is_over(caplog):
    limit = AdaptiveLimit(64, 64, "judge")
    with caplog.at_level(logging.INFO):
        for load in (64, 8, 30) * 12:
            limit.record_overload(limit.record_sent(load))
    assert limit.slots < 64 and limit.cause == CLOSED and limit in FALLEN
    assert caplog.messages == [f"[Limit] judge: concurrency lowered to 51, because {CLOSED}"]
    assert limit.in_words() == f"judge is limited to {limit.slots} of 64 concurrent calls, because {CLOSED}"
    answer(limit, 130)  # half a slot each
    assert (limit.slots, limit.cause) == (64, "") and limit not in FALLEN


def test_one_burst_of_overloads_lowers_the_limit_once():
    limit = AdaptiveLimit(20, 100)
    burst = [limit.record_sent(load) for load in range(1, 41)]
    for sent in burst[20:]:
        limit.record_overload(sent)
    assert limit.slots == 16


def test_without_anybody_waiting_and_after_an_overload_near_the_end_of_the_queue_no_slot_is_tried():
    limit = AdaptiveLimit(20, 100)
    answer(limit, 50, waiting=0)
    assert limit.slots == 20
    refuse_above(20, limit, times=4)
    answer(limit, 100, waiting=38)  # less than three rounds of 12.8
    assert limit.slots == 12
    answer(limit, 13, waiting=40)
    assert limit.slots == 13


@given(st.lists(st.sampled_from(["answered", "overloaded"]), max_size=200), st.integers(1, 40), st.integers(1, 40))
def test_the_limit_stays_between_1_and_the_cap(events, start, cap):
    limit = AdaptiveLimit(start, cap)
    for load, event in enumerate(events):
        sent = limit.record_sent(load % (limit.slots + 1))
        limit.record_answer(waiting=1000) if event == "answered" else limit.record_overload(sent)
        assert 1 <= limit.slots <= cap


async def test_a_call_that_is_turned_away_stands_in_front_of_the_line():
    """Two slots, calls of 1 s, and the first request of call 0 is refused after 1 s."""
    order, refused = [], []

    async def attempt(number):
        order.append(number)
        await asyncio.sleep(1.0)
        if number == 0 and not refused:
            refused.append(number)
            raise ServiceOverloaded("later")

    two = Transport("two", max_concurrency=2, attempt_timeout_s=9, max_attempts=3, hedge_fraction=0)
    await asyncio.gather(*(two.call(partial(attempt, number)) for number in range(9)))
    # at 1 s calls 2 and 3 have the slots, since request 1 was sent later and answered; call 0 waits 1.0 to 1.2 s
    assert order == [0, 1, 2, 3, 4, 5, 0, 6, 7, 8]


@pytest.mark.parametrize(("most", "full_ms"), [(2, 4000), (10, 0)])
async def test_time_in_which_calls_queue_at_the_highest_limit_is_counted(most, full_ms):
    judge = Transport("judge", max_concurrency=most, attempt_timeout_s=9, max_attempts=3, hedge_fraction=0)
    await asyncio.gather(*(judge.call(partial(asyncio.sleep, 1.0)) for _ in range(10)))
    # two of ten calls of 1 s at once: the last two leave the queue after 4 s. Eight at first, of ten: the limit grows
    assert judge.drain_traffic()["full_ms"] == full_ms
    assert judge.drain_traffic()["full_ms"] == 0


async def test_calls_that_queue_behind_refused_ones_do_not_count_as_a_full_limit():
    refused = []

    async def attempt(number):
        await asyncio.sleep(0.1)
        if number < 2 and number not in refused:
            refused.append(number)
            raise ServiceOverloaded("later", retry_after_s=3.0)

    two = Transport("two", max_concurrency=2, attempt_timeout_s=9, max_attempts=3, hedge_fraction=0)
    await asyncio.gather(*(two.call(partial(attempt, number)) for number in range(4)))
    assert two.drain_traffic()["full_ms"] <= 300


async def test_calls_that_are_cut_off_in_line_leave_no_slot_behind():
    one = Transport("one", max_concurrency=1, attempt_timeout_s=9, max_attempts=3, hedge_fraction=0)

    async def turned_away():
        raise ServiceOverloaded("later")

    first = asyncio.create_task(one.call(partial(asyncio.sleep, 1.0)))
    others = [asyncio.create_task(one.call(turned_away)) for _ in range(5)]
    await asyncio.sleep(1.5)  # the first of them waits after a refusal, the others are in line
    for task in others:
        task.cancel()
    await asyncio.gather(first, *others, return_exceptions=True)
    flights = one._flights.get()
    assert (flights._taken, len(flights._line), flights._turned_away) == (0, 0, {})
    assert await one.call(partial(asyncio.sleep, 0, "ok")) == "ok"
    with deadline(0.5), pytest.raises(DeadlineExceeded):
        await asyncio.gather(one.call(partial(asyncio.sleep, 1.0)), one.call(partial(asyncio.sleep, 1.0)))


async def test_an_inner_deadline_cannot_prolong_an_outer_one():
    with deadline(1.0), deadline(10.0):
        assert remaining_s() == pytest.approx(1.0)
