"""The law of the adaptive limit."""

from hypothesis import given
from hypothesis import strategies as st

from salesrl_trl.reward.service.limits import AdaptiveLimit


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
