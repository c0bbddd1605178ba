"""The clock of a GPU, with events whose times a test gives (tests/gpu has real ones), and the use of the machine."""

import math
from collections import namedtuple
from unittest.mock import Mock

import psutil
import pytest
import torch

from salesrl_trl.names import GPU_BUSY
from salesrl_trl.telemetry import device as module
from salesrl_trl.telemetry.device import LARGEST_DRIFT, EventClock, MachineUse
from salesrl_trl.telemetry.timeline import Mark


def mark(host, device):
    """Reached at `device` seconds on the device's scale, which begins anywhere."""
    event = Mock(at=device, elapsed_time=lambda other: 1000 * (other.at - device))
    made = Mark(event)
    made.host = host
    return made


def times(clock, marks):
    clock.settle(marks)
    return [each.time for each in marks]


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


def test_events_are_given_back_but_for_the_last_one_which_the_next_step_is_measured_from():
    clock = EventClock()
    first, second = [mark(1.0, 1.0), mark(2.0, 2.0)], [mark(3.0, 3.0), mark(4.0, 4.0)]
    events = [each.event for each in first]
    times(clock, first)
    assert [each.synchronize.called for each in events] == [False, True]  # for the last one alone
    assert [each.event is None for each in first] == [True, False]
    times(clock, second)
    assert [each.event is None for each in (*first, *second)] == [True, True, True, False]


def test_a_device_that_has_failed_leaves_the_hosts_times(monkeypatch):
    def broken(**_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    clock = EventClock()
    times(clock, [mark(10.0, 1000.0)])
    monkeypatch.setattr(torch.cuda, "Event", broken)
    lost = clock.mark()
    assert not clock.is_reached(lost)
    assert times(clock, [mark(11.0, 1001.0), lost]) == [11.0, lost.host]


Disk = namedtuple("Disk", "read_bytes write_bytes")


def test_samples_are_averaged_and_disks_are_counted_from_one_line_to_the_next(monkeypatch):
    now = iter([10.0, 14.0, 17.0])  # built, then drained twice
    disks = iter([Disk(0, 0), Disk(8e6, 4e6), Disk(8e6, 10e6)])
    busy = iter([50, 100])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: next(disks))
    monkeypatch.setattr(torch.cuda, "utilization", lambda _: next(busy))
    use = MachineUse(torch.device("cuda"))
    assert [use.sample(), use.sample()] == ["GPU 50 % busy", "GPU 100 % busy"]
    assert list(use.drain().values()) == [0.75, 2.0, 1.0]
    idle = use.drain()
    assert list(idle.values())[1:] == [0.0, 2.0]
    assert math.isnan(idle[GPU_BUSY])


def test_what_the_machine_does_not_say_is_no_number(monkeypatch):
    def unavailable(*_):
        raise NotImplementedError("neither /proc/diskstats nor /sys/block")

    monkeypatch.setattr(psutil, "disk_io_counters", unavailable)
    monkeypatch.setattr(torch.cuda, "utilization", unavailable)
    for device in ("cuda", "cpu"):
        use = MachineUse(torch.device(device))
        assert use.sample() == ""
        assert all(math.isnan(value) for value in use.drain().values())
