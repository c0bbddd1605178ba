"""Device and machine readings for `instruments`: when marks were reached, memory usage, and GPU and disk activity."""

import contextlib
import math
import time
from collections.abc import Sequence

import psutil
import torch

from salesrl_trl.names import DISK_READ, DISK_WRITE, GPU_BUSY
from salesrl_trl.telemetry.timeline import Clock, Mark

GIB = 2.0**30
_PROCESS = psutil.Process()
LARGEST_DRIFT = 1e-4
"""Maximum share of an interval by which a GPU's clock may run ahead of the host's; excess is clipped. Crystals drift
by less than half of this."""


class EventClock(Clock):
    """A clock whose marks are CUDA events. Recording one costs microseconds and never waits for the device. Events
    measure the time between marks. The device reaches a mark only after the host has issued it, and immediately when
    idle. In GRPO it idles in every step while waiting for rewards, so the largest difference between host and device
    time is exact."""

    def __init__(self) -> None:
        self._anchor: Mark | None = None

    def mark(self) -> Mark:
        try:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        except RuntimeError:  # the device has failed; this error must not mask its own, which is raised later
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
            mark.event = None  # returns it to the device's pool
        if self._anchor is not None:
            self._anchor.event = None
        self._anchor = marks[-1]

    def is_reached(self, mark: Mark) -> bool:
        try:
            return mark.event is not None and bool(mark.event.query())
        except RuntimeError:
            return False


def device_name(device: torch.device) -> str:
    """The driver's name, e.g. `"NVIDIA H200"`; the device type, e.g. `"cpu"`, without a driver."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def memory_gib(device: torch.device) -> tuple[float, float, float, float]:
    """Memory in GiB, in the order of `names.MEMORY`: allocated, reserved and, since `forget_peak`, peak memory of the
    device (NaN without a GPU; includes a colocated vLLM's through PyTorch), and this process's host memory."""
    host = _PROCESS.memory_info().rss / GIB
    if device.type != "cuda":
        return (float("nan"), float("nan"), float("nan"), host)
    # one call: torch.cuda.memory_allocated() and similar functions flatten all statistics each time
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return (allocated["current"] / GIB, reserved["current"] / GIB, allocated["peak"] / GIB, host)


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


class MachineUse:
    """GPU and disk utilisation since the last `drain`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._busy: list[float] = []
        self._since, self._disk = time.perf_counter(), _disk_bytes()

    def sample(self) -> str:
        """Sample the GPU's utilisation over the last second from the heartbeat thread: `"GPU 97 % busy"`. Empty
        without a GPU, without the package `pynvml`, or if the driver does not report it."""
        if self._device.type == "cuda":
            with contextlib.suppress(Exception):  # skip this sample
                busy = torch.cuda.utilization(self._device)
                self._busy.append(busy / 100)
                return f"GPU {busy} % busy"
        return ""

    def drain(self) -> dict[str, float]:
        """The share of time in which the GPU ran a kernel (mean of the samples), and the MB/s of all disks of this
        machine; NaN if unknown. Resets the measurement."""
        busy, self._busy = self._busy, []
        now, disk = time.perf_counter(), _disk_bytes()
        read, written = ((new - old) / 1e6 / (now - self._since) for new, old in zip(disk, self._disk, strict=True))
        self._since, self._disk = now, disk
        share = sum(busy) / len(busy) if busy else math.nan
        return {GPU_BUSY: share, DISK_READ: read, DISK_WRITE: written}


def _disk_bytes() -> tuple[float, float]:
    """Bytes read and written by all disks since boot; NaN if the system does not report them."""
    try:
        counters = psutil.disk_io_counters()
    except (NotImplementedError, OSError, ValueError):  # containers may hide the counters
        counters = None
    return (math.nan, math.nan) if counters is None else (counters.read_bytes, counters.write_bytes)
