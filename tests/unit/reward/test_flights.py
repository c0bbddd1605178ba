"""Calls in flight: the law of their number, when one is late, and which of several requests for a call counts."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from salesrl_trl.reward.service.flights import MARGIN, MIN_SAMPLES, AdaptiveLimit, HedgePolicy, _Flight


@pytest.mark.parametrize("good", [0, 1, None])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_answer_counts_also_where_a_failure_comes_at_the_same_moment(order, good):
    """Both have ended when the first of them is looked at."""

    async def run():
        loop, beside = asyncio.get_running_loop(), []
        answers = [loop.create_future() for _ in range(2)]
        left = iter(answers)

        async def attempt():
            return await next(left)

        flight = _Flight(attempt, 1, lambda error, number: beside.append(number))
        flight.send(2)
        await asyncio.sleep(0)
        for place in order:
            if place == good:
                answers[place].set_result("an answer")
            else:
                answers[place].set_exception(ValueError(str(place)))
        try:
            result = await asyncio.wait_for(flight.result, 10)
        except ValueError as error:
            result = str(error)
        return result, beside, flight.won_by_hedge

    result, beside, won_by_hedge = asyncio.run(run())
    if good is None:
        assert (result, beside) == (str(order[1]), [order[0] + 1])  # one is told of, the other raised
    else:
        assert (result, won_by_hedge) == ("an answer", good == 1)
        assert beside == ([] if order[0] == good else [order[0] + 1])


def test_nothing_is_late_before_enough_is_known():
    policy = HedgePolicy(0.05)
    for _ in range(MIN_SAMPLES - 1):
        policy.record_answer(1.0)
    assert policy.late_after_s is None
    policy.record_answer(1.0)
    assert policy.late_after_s == pytest.approx(MARGIN)


def test_late_is_a_margin_above_the_95th_percentile():
    policy = HedgePolicy(0.05)
    for index in range(100):
        policy.record_answer(float(index))
    # the last refresh was after 20 + 5 x 16 = 100 answers; rank 0.95 x 99 = 94.05
    assert policy.late_after_s == pytest.approx(94 * MARGIN)


def test_two_percent_of_stragglers_do_not_move_it():
    policy = HedgePolicy(0.05)
    for index in range(320):
        policy.record_answer(20.0 if index % 50 == 49 else 1.0)
    assert policy.late_after_s == pytest.approx(MARGIN)


def test_extra_calls_stay_a_share_of_all():
    policy = HedgePolicy(0.05)
    hedges = 0
    for _ in range(1000):
        policy.sent += 1
        if policy.affordable:
            policy.hedges += 1
            hedges += 1
    assert hedges == 50


def answer(limit, times, waiting=1000):
    for _ in range(times):
        limit.record_answer(waiting=waiting)


def test_a_round_of_answers_grows_the_slow_start_by_half():
    limit = AdaptiveLimit(8, 100)
    answer(limit, 8)
    assert limit.slots == 12  # 8 + 8 x 1/2


def test_after_an_overload_a_round_of_answers_adds_one_slot():
    limit = AdaptiveLimit(20, 100)
    limit.record_overload(limit.record_sent())
    assert limit.slots == 16  # 0.8 x 20
    answer(limit, 17)
    assert limit.slots == 17  # 17 answers of 1/16 or a little less


def test_one_burst_of_overloads_lowers_the_limit_once():
    limit = AdaptiveLimit(20, 100)
    burst = [limit.record_sent() for _ in range(20)]
    for number in burst:
        limit.record_overload(number)
    assert limit.slots == 16
    limit.record_overload(limit.record_sent())  # sent afterwards: news
    assert limit.slots == 12  # 0.8 x 16 = 12.8


def test_without_anybody_waiting_there_is_nothing_to_grow_for():
    limit = AdaptiveLimit(8, 100)
    answer(limit, 50, waiting=0)
    assert limit.slots == 8


def test_after_an_overload_near_the_end_of_the_queue_no_slot_is_tried():
    limit = AdaptiveLimit(20, 100)
    limit.record_overload(limit.record_sent())
    answer(limit, 100, waiting=47)  # less than three rounds of 16
    assert limit.slots == 16
    answer(limit, 17, waiting=51)
    assert limit.slots == 17


@given(st.lists(st.sampled_from(["answered", "overloaded"]), max_size=200), st.integers(1, 40), st.integers(1, 40))
def test_the_limit_stays_between_1_and_the_cap(events, start, cap):
    limit = AdaptiveLimit(start, cap)
    for event in events:
        number = limit.record_sent()
        limit.record_answer(waiting=1000) if event == "answered" else limit.record_overload(number)
        assert 1 <= limit.slots <= cap
