"""The clock of a GPU, with events whose times a test gives; tests/gpu has real ones."""

import math

import pytest
import torch

from salesrl_trl.telemetry.device import LARGEST_DRIFT, EventClock, clock_of, device_name, memory_gib
from salesrl_trl.timing import HostClock, Mark


class Event:
    """Reached at `at` seconds on the device's scale, which begins anywhere."""

    def __init__(self, at):
        self.at = at
        self.waited = False

    def synchronize(self):
        self.waited = True

    def elapsed_time(self, other):
        return 1000 * (other.at - self.at)

    def query(self):
        return True


def mark(host, device):
    made = Mark(Event(device))
    made.host = host
    return made


def times(clock, marks):
    clock.settle(marks)
    return [each.time for each in marks]


def test_a_mark_that_an_idle_device_reached_at_once_ties_the_two_scales():
    # The device's scale begins at 1000. It is 3 s behind at the second mark and idle at the third.
    marks = [mark(10.0, 1000.0), mark(11.0, 1004.0), mark(15.0, 1005.0)]
    assert times(EventClock(), marks) == pytest.approx([10.0, 14.0, 15.0])


def test_a_device_behind_at_the_first_mark_is_known_by_a_later_one():
    marks = [mark(10.0, 1002.0), mark(15.0, 1005.0)]
    assert times(EventClock(), marks) == pytest.approx([12.0, 15.0])


def test_steps_join_without_a_gap_and_without_going_back():
    clock = EventClock()
    first = [mark(10.0, 1000.0), mark(11.0, 1004.0), mark(15.0, 1005.0)]
    times(clock, first)
    # In the second step the device is never idle: by itself it would seem to be at the host's time
    second = [mark(15.5, 1006.0), mark(15.6, 1008.0)]
    assert times(clock, second) == pytest.approx([16.0, 18.0], abs=3.1 * LARGEST_DRIFT)
    assert first[-1].time <= second[0].time <= second[1].time


def test_a_device_whose_clock_runs_fast_is_held_back():
    clock, host, device = EventClock(), 0.0, 1000.0
    times(clock, [mark(host, device)])
    for _ in range(1000):  # 1000 steps of 10 s, 50 millionths fast, idle once in each
        host, device = host + 10.0, device + 10.0 * (1 + 50e-6)
        (reached,) = times(clock, [mark(host, device)])
        assert host <= reached <= host + 1e-3


def test_the_last_mark_is_waited_for_once():
    marks = [mark(1.0, 1.0), mark(2.0, 2.0)]
    times(EventClock(), marks)
    assert [each.event.waited for each in marks] == [False, True]


def test_a_cpu_has_the_hosts_clock_a_name_and_no_device_memory():
    cpu = torch.device("cpu")
    assert isinstance(clock_of(cpu), HostClock)
    assert device_name(cpu) == "cpu"
    *device, host = memory_gib(cpu)
    assert all(math.isnan(each) for each in device)
    assert 0.05 < host < 1000  # this process has torch in it
