"""Phases that add up. Where exact figures are wanted, the clock is a test's own."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from salesrl_trl.names import Phase
from salesrl_trl.telemetry.timeline import MAX_STEPS_KEPT, Mark, Timeline
from salesrl_trl.timing import overlap

UNACCOUNTED = Phase.UNACCOUNTED


class Script:
    """A clock that is told the time; the device is `behind` by so much until `settle`."""

    def __init__(self):
        self.now = 0.0
        self.behind = 0.0
        self.settled = 0

    def mark(self):
        mark = Mark(event=self.now + self.behind)
        mark.host = self.now
        return mark

    def settle(self, marks):
        self.settled += 1
        for mark in marks:
            mark.time = mark.event

    def is_reached(self, mark):
        return True


@pytest.fixture
def clock():
    return Script()


@pytest.fixture
def timeline(clock):
    return Timeline(clock, opaque=("evaluation",))


def spend(clock, seconds):
    clock.now += seconds


def ended(timeline):
    timeline.step_ends()
    (step,) = timeline.drain_steps()
    return step


def test_the_parts_of_a_step_sum_to_it_and_the_rest_is_told(clock, timeline):
    timeline.starts()
    spend(clock, 1)  # nobody's
    with timeline.phase("generation"):
        spend(clock, 2)
        with timeline.phase("weight_push"):
            spend(clock, 4)
        spend(clock, 8)
    spend(clock, 16)  # nobody's
    with timeline.phase("forward"):
        spend(clock, 32)
    step = ended(timeline)
    # generation without the push inside it: 2 + 8; nobody's: 1 + 16
    assert step.seconds == {UNACCOUNTED: 17, "generation": 10, "weight_push": 4, "forward": 32}
    assert step.wall == 63 == sum(step.seconds.values())


def test_what_lies_inside_an_evaluation_is_evaluation(clock, timeline):
    timeline.starts()
    with timeline.phase("evaluation"):
        spend(clock, 1)
        with timeline.phase("generation"):
            spend(clock, 2)
    step = ended(timeline)
    assert step.seconds == {UNACCOUNTED: 0, "evaluation": 3}
    assert {span.name: span.seconds for span in timeline.drain_spans()} == {"evaluation": 3, "generation": 2}


def test_a_phase_over_the_end_of_a_step_belongs_to_both(clock, timeline):
    timeline.starts()
    with timeline.phase("evaluation"):
        spend(clock, 1)
        timeline.step_ends()
        spend(clock, 2)
    timeline.step_ends()
    first, second = timeline.drain_steps()
    assert first.seconds == {UNACCOUNTED: 0, "evaluation": 1}
    assert second.seconds == {"evaluation": 2, UNACCOUNTED: 0}
    assert [span.seconds for span in timeline.drain_spans()] == [3]


def test_time_is_the_devices_where_it_works_behind_the_host(clock, timeline):
    """The host issues 5 s of work in 1 s, then waits 6 s for rewards, for 4 s of which the device still works."""
    timeline.starts()
    with timeline.phase("forward"):
        spend(clock, 1)
        clock.behind = 4.0  # at the host's 1 s the device is done at 5 s
    with timeline.phase("reward_wait"):
        spend(clock, 6)
        clock.behind = 0.0  # at the host's 7 s it has long been idle
    step = ended(timeline)
    # forward from 0 to 5, the wait from 5 to 7: rewards that ran from 1 to 7 were hidden for 4 s of 6
    assert step.seconds == {UNACCOUNTED: 0, "forward": 5, "reward_wait": 2}
    wait = next(span for span in timeline.drain_spans() if span.name == "reward_wait")
    assert overlap((1, 7), (wait.started, wait.ended)) == 2


def test_nothing_is_settled_before_it_is_asked_for_and_of_what_nobody_asks_for_the_oldest_goes(clock, timeline):
    timeline.starts()
    for _ in range(MAX_STEPS_KEPT + 5):
        with timeline.phase("forward"):
            spend(clock, 1)
        timeline.step_ends()
    assert clock.settled == 0
    assert [step.wall for step in timeline.drain_steps()] == [1] * MAX_STEPS_KEPT


def test_a_phase_that_raises_or_is_open_at_the_end_is_a_failed_span_and_the_error_passes_through(clock, timeline):
    timeline.starts()
    with pytest.raises(ValueError, match="mine"), timeline.phase("generation"):
        spend(clock, 2)
        timeline.begin("advantages")  # open inside it: that failed too
        raise ValueError("mine")
    timeline.begin("optimizer")
    spend(clock, 3)
    cut_off = timeline.close()
    assert cut_off.seconds == {UNACCOUNTED: 0, "generation": 2, "advantages": 0, "optimizer": 3}
    assert not cut_off.complete
    spans = {span.name: (span.failed, span.seconds) for span in timeline.drain_spans()}
    assert spans == {"generation": (True, 2), "advantages": (True, 0), "optimizer": (True, 3)}
    assert timeline.current is timeline.close() is None


def test_phases_before_the_first_step_and_after_the_last_are_spans(clock, timeline):
    with timeline.phase("engine"):
        spend(clock, 3)
    timeline.starts()
    timeline.step_ends()
    timeline.stops()
    with timeline.phase("evaluation"):
        spend(clock, 4)
    assert len(timeline.drain_steps()) == 1
    assert {span.name: span.seconds for span in timeline.drain_spans()} == {"engine": 3, "evaluation": 4}
    assert timeline.close() is None


def test_another_threads_phase_is_a_span_of_its_own(timeline):
    timeline.starts()

    def elsewhere():
        with timeline.phase("write"):
            pass

    with timeline.phase("forward"):
        thread = threading.Thread(target=elsewhere, name="writer")
        thread.start()
        thread.join()
        assert timeline.current[0] == "forward"
    timeline.step_ends()
    assert set(timeline.drain_steps()[0].seconds) == {UNACCOUNTED, "forward"}
    assert ("write", "writer") in [(span.name, span.track) for span in timeline.drain_spans()]


def test_the_current_phase_is_the_innermost_that_is_not_inside_an_opaque_one(timeline):
    assert timeline.current is None
    with timeline.phase("generation"), timeline.phase("weight_push"):
        assert timeline.current[0] == "weight_push"
    with timeline.phase("evaluation"), timeline.phase("generation"):
        name, seconds = timeline.current
        assert name == "evaluation"
        assert seconds >= 0
    timeline.starts()
    assert timeline.current[0] == UNACCOUNTED  # between phases
    timeline.stops()
    assert timeline.current is None


def test_a_new_run_starts_with_nothing_of_an_earlier_one(clock, timeline):
    timeline.starts()
    timeline.begin("optimizer")  # left open by an error that somebody caught
    spend(clock, 5)
    timeline.step_ends()
    timeline.starts()
    spend(clock, 1)
    timeline.step_ends()
    assert [step.seconds for step in timeline.drain_steps()] == [{UNACCOUNTED: 1}]


def test_a_device_that_hangs_is_left_and_the_hosts_times_count(clock, timeline, monkeypatch):
    monkeypatch.setattr("salesrl_trl.telemetry.timeline.CLOSE_PATIENCE_S", 0.05)
    clock.is_reached = lambda mark: False
    timeline.starts()
    with timeline.phase("forward"):
        spend(clock, 2)
        clock.behind = 1e9
    cut_off = timeline.close()
    assert cut_off.seconds == {UNACCOUNTED: 0, "forward": 2}


@given(
    st.recursive(
        st.lists(st.integers(1, 9), max_size=3),
        lambda inner: st.lists(st.tuples(st.sampled_from(["a", "b", "evaluation"]), inner), max_size=3),
        max_leaves=12,
    )
)
def test_any_nesting_of_phases_sums_to_the_wall_time(tree):
    clock = Script()
    timeline = Timeline(clock, opaque=("evaluation",))

    def run(node):
        for item in node:
            if isinstance(item, tuple):
                name, inner = item
                with timeline.phase(name):
                    spend(clock, 1)
                    run(inner)
            else:
                spend(clock, item)

    timeline.starts()
    run(tree)
    step = ended(timeline)
    assert sum(step.seconds.values()) == step.wall == clock.now
