"""What only the device knows: when it reached a mark, and how full its memory is.

Owns the events behind a timeline's marks on a GPU, and the reading of memory. What the figures are called is `perf`'s.
"""

from collections.abc import Sequence

import psutil
import torch

from salesrl_trl.telemetry.timeline import Clock, HostClock, Mark

GIB = 2.0**30
_PROCESS = psutil.Process()
LARGEST_DRIFT = 1e-4
"""By how much of an interval a GPU's clock may run ahead of the host's before it is held back. Crystals are within
half of it."""


class EventClock:
    """Marks are CUDA events: recording one takes some microseconds and never waits for the device.

    When a mark was reached is known from the time between events. How that scale lies on the host's follows from one
    fact: the device reaches no mark before the host has issued it. At the moment of a step at which the device is
    idle, which GRPO always has while it waits for rewards, it is reached at once, so that the largest such difference
    is exact.
    """

    def __init__(self) -> None:
        self._anchor: Mark | None = None

    def mark(self) -> Mark:
        try:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        except RuntimeError:  # a device that has failed: the error that says so is not to be hidden by this one
            return Mark()
        return Mark(event)

    def settle(self, marks: Sequence[Mark]) -> None:
        for mark in marks:
            if mark.event is None:
                mark.time = mark.host
        marks = [mark for mark in marks if mark.event is not None]
        if not marks:
            return
        marks[-1].event.synchronize()
        anchor = self._anchor or marks[0]
        since = [anchor.event.elapsed_time(mark.event) / 1000 for mark in marks]
        start = max(mark.host - seconds for mark, seconds in zip(marks, since, strict=True))
        latest = 0.0
        if anchor.time is not None:
            start, latest = max(start, anchor.time - LARGEST_DRIFT * since[-1]), anchor.time
        for mark, seconds in zip(marks, since, strict=True):
            latest = mark.time = max(latest, start + seconds)
        for mark in marks[:-1]:
            mark.event = None  # the device has a pool of them
        if self._anchor is not None:
            self._anchor.event = None
        self._anchor = marks[-1]

    def is_reached(self, mark: Mark) -> bool:
        try:
            return mark.event is not None and bool(mark.event.query())
        except RuntimeError:
            return False


def clock_of(device: torch.device) -> Clock:
    """Events on a CUDA or ROCm device, the host's own clock elsewhere."""
    return EventClock() if device.type == "cuda" else HostClock()


def device_name(device: torch.device) -> str:
    """As the driver says it: `"NVIDIA H200"`; the device's type where there is no driver to ask: `"cpu"`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def memory_gib(device: torch.device) -> tuple[float, float, float, float]:
    """Allocated, reserved and most allocated memory of the device since `forget_peak`, NaN without a GPU; and the host
    memory of this process. In GiB. What a colocated vLLM has allocated through PyTorch is in it."""
    host = _PROCESS.memory_info().rss / GIB
    if device.type != "cuda":
        return (float("nan"), float("nan"), float("nan"), host)
    # one call, without the flattening that each of torch.cuda.memory_allocated() and its like does
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return (allocated["current"] / GIB, reserved["current"] / GIB, allocated["peak"] / GIB, host)


def forget_peak(device: torch.device) -> None:
    """The most allocated memory is counted anew from now on, for all who ask PyTorch."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
