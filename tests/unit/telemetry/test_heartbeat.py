"""The line while a phase lasts long."""

import logging
import threading
from types import SimpleNamespace

import pytest

from salesrl_trl.names import Phase
from salesrl_trl.telemetry.instruments import ADVICE, Heartbeat


class Events:
    """As much of `Instruments` as a heartbeat reads. Its timeline is itself."""

    def __init__(self, look, sample, details):
        self._look, self.details, self.timeline = look, details, self
        self.machine = SimpleNamespace(sample=sample)

    @property
    def current(self):
        return self._look()

    def where(self):
        return "step 3/21"


def heartbeat(current, after_s=0.1, sample=str, **details):
    return Heartbeat(Events(current, sample, details), after_s)


@pytest.fixture
def told(caplog):
    """The lines of a heartbeat that looks at a phase once for each of these seconds, and then at none."""
    caplog.set_level(logging.INFO, logger="salesrl_trl")

    def run(*seconds, names=("generation",), **given):
        left, done = iter(enumerate(seconds)), threading.Event()

        def current():
            place, now = next(left, (None, None))
            if now is None:
                done.set()
                return None
            return names[place % len(names)], now

        beat = heartbeat(current, **given)
        assert done.wait(10)
        beat.stop()
        return caplog.messages

    return run


def test_it_names_phase_and_seconds_says_what_is_out_and_what_to_look_at():
    beat = heartbeat(lambda: None, reward_wait=lambda: "52 in judge (of 64 completions)")
    line = beat.line("reward_wait", 12.3, "")
    beat.stop()
    assert line.startswith("[Heartbeat] step 3/21: reward_wait for 12 s: 52 in judge (of 64 completions). Look at: ")
    assert "its concurrency limit" in line


@pytest.mark.parametrize("processes", ["1", "2"])
def test_it_names_other_ranks_only_if_there_are_several(processes, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", processes)
    beat = heartbeat(lambda: None)
    lines = [beat.line(phase, 12.3, "") for phase in Phase]
    beat.stop()
    assert any("rank" in line for line in lines) == (processes == "2")


def test_every_phase_of_training_has_an_advice():
    assert set(Phase) - {"unaccounted"} <= set(ADVICE)


def test_stopping_ends_the_thread():
    others = set(threading.enumerate())  # another test's trainer may not be finished yet
    beat = heartbeat(lambda: None, after_s=60.0)
    assert set(threading.enumerate()) - others
    beat.stop()
    assert not set(threading.enumerate()) - others


@pytest.mark.parametrize(
    ("seconds", "lines"),
    [
        ((0.1, 0.15, 0.2, 0.3, 0.4), 3),  # at each doubling
        ((4.6, 4.7, 4.8, 6.3, 6.5), 2),  # after a late look at the next one: of 0.1 s, 6.4 s comes after 3.2 s
        ((0.11, 0.15, 0.01, 0.11, 0.15), 2),  # the same phase once more, after a rest, is told of anew
    ],
)
def test_a_long_phase_is_told_of_at_each_doubling(told, seconds, lines):
    said = told(*seconds, sample=lambda: "GPU 7 % busy")
    assert ["GPU 7 % busy). Look at: " in line for line in said] == [True] * lines


def test_a_fault_in_what_is_told_beside_it_does_not_end_the_heartbeat(told):
    lines = told(0.1, 0.2, names=("reward_wait",), reward_wait=lambda: 1 / 0)
    assert ["ZeroDivisionError while collecting details" in line for line in lines] == [True, True]
