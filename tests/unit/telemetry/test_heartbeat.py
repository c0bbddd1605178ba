"""The line while a phase lasts long."""

import logging
import threading
import time

import pytest

from salesrl_trl.names import Phase
from salesrl_trl.telemetry.heartbeat import ADVICE, Heartbeat


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="salesrl_trl")
    return lambda: [record.getMessage() for record in caplog.records]


def wait_for(condition):
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < 10
        time.sleep(0.01)


def looks(seconds):
    """What each look at a phase sees, and an event for when all has been seen."""
    left, done = iter(seconds), threading.Event()

    def current():
        now = next(left, None)
        if now is None:
            done.set()
            return None
        return "generation", now

    return done, current


def heartbeat(current, after_s=0.1, **details):
    return Heartbeat(current, after_s, lambda: "step 3/21", details)


def test_it_names_phase_and_seconds_says_what_is_out_and_what_to_look_at():
    beat = heartbeat(lambda: None, reward_wait=lambda: "of 64 completions 52 in judge")
    line = beat.line("reward_wait", 12.3)
    assert line.startswith("[Heartbeat] step 3/21: reward_wait for 12 s: of 64 completions 52 in judge. Look at: ")
    assert "judge_max_concurrency" in line


def test_it_says_how_busy_the_gpu_is_if_that_is_known(lines):
    done, current = looks([0.2])
    beat = Heartbeat(current, 0.1, lambda: "step 3/21", {}, lambda: "GPU 7 % busy")
    beat.start()
    assert done.wait(10)
    beat.stop()
    assert lines()[0].startswith("[Heartbeat] step 3/21: generation for 0 s (GPU 7 % busy). Look at: ")


def test_every_phase_of_training_has_an_advice():
    assert set(Phase) - {"unaccounted"} <= set(ADVICE)


def test_a_long_phase_is_told_of_at_each_doubling(lines):
    began = time.perf_counter()
    beat = heartbeat(lambda: ("generation", time.perf_counter() - began))
    beat.start()
    wait_for(lambda: len(lines()) >= 3)
    beat.stop()
    # 0.1, 0.2 and 0.4 s after it began, or later where this thread had to wait
    assert time.perf_counter() - began >= 0.4
    assert all("generation for" in line for line in lines())


def test_after_a_late_look_the_next_line_comes_at_the_next_doubling(lines):
    done, current = looks([4.6, 4.7, 4.8, 6.3, 6.5])  # of 0.1 s: 3.2 s has passed long ago, the next is 6.4 s
    beat = heartbeat(current)
    beat.start()
    assert done.wait(10)
    beat.stop()
    assert ["for 5 s" in lines()[0], "for 6 s" in lines()[1], len(lines())] == [True, True, 2]


def test_a_fault_in_what_is_told_beside_it_does_not_end_the_heartbeat(lines):
    began = time.perf_counter()
    beat = heartbeat(lambda: ("reward_wait", time.perf_counter() - began), reward_wait=lambda: 1 / 0)
    beat.start()
    wait_for(lambda: len(lines()) >= 2)
    beat.stop()
    assert "ZeroDivisionError while asking for more" in lines()[0]


def test_short_phases_are_not_told_of(lines):
    looked = threading.Event()
    count = [0]

    def current():
        count[0] += 1
        if count[0] > 20:
            looked.set()
        return ("forward", "backward")[count[0] % 2], 0.05

    beat = heartbeat(current)
    beat.start()
    assert looked.wait(10)
    beat.stop()
    assert lines() == []


def test_the_same_phase_once_more_is_told_of_anew(lines):
    """A rest between two long phases of the same name: the second is told of at its own 0.1 s, not at 0.2 s."""
    done, current = looks([0.11, 0.15, 0.01, 0.11, 0.15])
    beat = heartbeat(current)
    beat.start()
    assert done.wait(10)
    beat.stop()
    assert len(lines()) == 2


def test_stopping_ends_the_thread():
    others = set(threading.enumerate())  # another test's trainer may not be finished yet
    beat = heartbeat(lambda: None, after_s=60.0)
    beat.start()
    assert set(threading.enumerate()) - others
    beat.stop()
    assert not set(threading.enumerate()) - others
