"""The breaker's states, at moments that the test names."""

import pytest

from salesrl_trl.service.breaker import (
    COOLDOWN_S,
    DENIED_COOLDOWN_S,
    FAILURES_TO_OPEN,
    MAX_COOLDOWN_S,
    MAX_DENIED_COOLDOWN_S,
    SAME_OUTAGE_S,
    Breaker,
)


def opened():
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        assert breaker.permit(0.0) == 0 and not breaker.is_open
        breaker.record_failure(0.0, probe=0)
    assert breaker.is_open
    return breaker


def test_a_failure_of_long_ago_is_no_part_of_an_outage():
    breaker = Breaker()
    breaker.record_failure(0.0)
    breaker.record_failure(SAME_OUTAGE_S)
    assert breaker.down_for_s(SAME_OUTAGE_S) == SAME_OUTAGE_S
    breaker.record_failure(2 * SAME_OUTAGE_S + 1)  # nobody called in between
    assert breaker.down_for_s(2 * SAME_OUTAGE_S + 1) == 0.0


def test_a_pause_is_as_long_as_the_endpoint_asks_for_up_to_a_limit():
    for asked, given in ((0.0, COOLDOWN_S), (7.0, 7.0), (3600.0, MAX_COOLDOWN_S)):
        breaker = Breaker()
        for _ in range(FAILURES_TO_OPEN):
            breaker.record_failure(0.0, pause_s=asked)
        assert breaker.pause_left_s(0.0) == given


def test_an_abandoned_probe_leaves_the_next_caller_to_probe():
    breaker = opened()
    assert breaker.permit(COOLDOWN_S) == breaker.probe > 0
    breaker.record_abandoned(breaker.probe)
    assert breaker.permit(COOLDOWN_S) == breaker.probe > 0


def denied(breaker, times=FAILURES_TO_OPEN, code="judge_quota"):
    for _ in range(times):
        breaker.record_failure(0.0, denial=code)
    return breaker


def test_denials_in_a_row_open_it_and_where_it_never_answered_there_is_no_use_in_waiting():
    for answered in (False, True):
        breaker = Breaker()
        if answered:
            breaker.record_answer()
        assert not denied(breaker, times=FAILURES_TO_OPEN - 1).is_open
        assert denied(breaker, times=1).is_open
        assert (breaker.denial, breaker.is_hopeless) == ("judge_quota", not answered)


@pytest.mark.parametrize(
    ("denial", "first", "longest"),
    [(None, COOLDOWN_S, MAX_COOLDOWN_S), ("judge_quota", DENIED_COOLDOWN_S, MAX_DENIED_COOLDOWN_S)],
)
def test_every_failed_probe_doubles_the_pause_up_to_a_limit(denial, first, longest):
    breaker, now, pauses = denied(Breaker(), code=denial), 0.0, []
    for _ in range(10):
        pauses.append(breaker.pause_left_s(now))
        now += pauses[-1]
        assert breaker.permit(now) == breaker.probe > 0
        breaker.record_failure(now, probe=breaker.probe, denial=denial)
    assert pauses == pytest.approx([min(first * 2**number, longest) for number in range(10)])
    assert breaker.permit(now + longest) == breaker.probe > 0
    breaker.record_answer()
    assert (breaker.permit(now), breaker.denial) == (0, None)


def test_a_probe_that_was_overtaken_counts_like_any_other_call():
    breaker = opened()
    assert breaker.permit(COOLDOWN_S) == breaker.probe > 0
    stale = breaker.probe
    breaker.record_answer()  # by a call that was sent before
    breaker.record_failure(1.0, probe=stale)
    assert not breaker.is_open  # one failure is not five
    for _ in range(FAILURES_TO_OPEN):
        breaker.record_failure(1.0)
    assert breaker.permit(2.0) == breaker.probe > 0
    breaker.record_failure(2.0, probe=stale)
    breaker.record_abandoned(stale)
    assert breaker.permit(99.0) is None  # the second probe is still out
