"""The use of the GPU and of the disks between two log lines."""

import math
from collections import namedtuple

import psutil
import torch

from salesrl_trl.names import GPU_BUSY
from salesrl_trl.telemetry import machine_use
from salesrl_trl.telemetry.machine_use import MachineUse

Disk = namedtuple("Disk", "read_bytes write_bytes")


def test_samples_are_averaged_and_disks_are_counted_from_one_line_to_the_next(monkeypatch):
    now = iter([10.0, 14.0, 17.0])  # built, then drained twice
    disks = iter([Disk(0, 0), Disk(8e6, 4e6), Disk(8e6, 10e6)])
    busy = iter([50, 100])
    monkeypatch.setattr(machine_use.time, "perf_counter", lambda: next(now))
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
