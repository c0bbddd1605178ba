"""When a call is late, and how many extra calls there may be."""

import pytest

from salesrl_trl.reward.service.flights import MARGIN, MIN_SAMPLES, HedgePolicy


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
        policy.record_sent()
        if policy.affordable:
            policy.record_hedge()
            hedges += 1
    assert hedges == 50
