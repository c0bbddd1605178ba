"""How this process keeps its memory on a machine without a GPU.

Owns one setting of the C library. Standard library only.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Let glibc reuse freed blocks instead of giving each large one back to the kernel.

    Training on a CPU frees and takes tens of megabytes hundreds of times a step, and by default the kernel maps and
    clears every page anew: on two cores that was half of the time of a warm-start step (1.86 against 3.36 steps a
    second). The process keeps its peak memory in exchange. Elsewhere than on glibc this does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
