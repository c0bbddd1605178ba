"""How busy the GPU and the disks were, beside the phases of the steps.

Owns the samples of the GPU, which the heartbeat's thread takes, and the counters of the disks.
"""

import contextlib
import math
import time

import psutil
import torch

from salesrl_trl.names import DISK_READ, DISK_WRITE, GPU_BUSY


class MachineUse:
    """The use of the machine since the last figures.

    Args:
        device (`torch.device`):
            The device of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._busy: list[float] = []
        self._since, self._disk = time.perf_counter(), _disk_bytes()

    def sample(self) -> str:
        """Read the GPU's utilisation over the last second. From any thread.

        Returns:
            `str`: `"GPU 97 % busy"`; empty without a GPU, without the package `pynvml`, or if the driver does not say.
        """
        if self._device.type == "cuda":
            with contextlib.suppress(Exception):  # there is no sample then
                busy = torch.cuda.utilization(self._device)
                self._busy.append(busy / 100)
                return f"GPU {busy} % busy"
        return ""

    def drain(self) -> dict[str, float]:
        """Share of the time in which the GPU ran a kernel, mean of the samples, and MB/s of all disks of this machine;
        NaN where unknown. Starts over."""
        busy, self._busy = self._busy, []
        now, disk = time.perf_counter(), _disk_bytes()
        read, written = ((new - old) / 1e6 / (now - self._since) for new, old in zip(disk, self._disk, strict=True))
        self._since, self._disk = now, disk
        share = sum(busy) / len(busy) if busy else math.nan
        return {GPU_BUSY: share, DISK_READ: read, DISK_WRITE: written}


def _disk_bytes() -> tuple[float, float]:
    """Bytes read and written by all disks since the machine started; NaN where the system does not say."""
    try:
        counters = psutil.disk_io_counters()
    except (NotImplementedError, OSError, ValueError):  # a container may hide the counters
        counters = None
    return (math.nan, math.nan) if counters is None else (counters.read_bytes, counters.write_bytes)
