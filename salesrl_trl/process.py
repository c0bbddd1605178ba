"""Settings of one process: how it handles memory, how many files it may open, and the environment of its children.

Owns these settings only. Does not start children. Standard library only.
"""

import ctypes
import gc
import os
import resource
import sys
from pathlib import Path

VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Environment variables that choose a process's GPUs, of NVIDIA and AMD."""
NO_ACCELERATOR = {**dict.fromkeys(VISIBLE_DEVICES, "-1"), "JAX_PLATFORMS": "cpu"}
"""Environment variables in which a process sees no accelerator. -1 and not the empty string, which AMD's runtime reads
as all of them. bm25s imports JAX where that is installed, and JAX takes 75 % of every GPU that it sees."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = 2**31 - 1

_GC_THRESHOLDS = (50_000, 20, 100)
"""New objects, and rounds, between two collections of each generation. Python's own: 700, 10, 10."""
_GC_USUAL = gc.get_threshold()


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


def collect_seldom() -> None:
    """Spare what exists by now from garbage collection, and collect the rest seldom.

    What a run is made of lives as long as it; yet with a thousand calls in flight, walks over it took a third of the
    CPU time of a reward batch (0.86 against 0.55 ms a call).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def collect_as_usual() -> None:
    """Undo `collect_seldom`."""
    gc.unfreeze()
    gc.set_threshold(*_GC_USUAL)


def allow_files(count: int) -> None:
    """Let this process have so many files and connections open, as far as the machine lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def child_environment(*, with_gpu: bool = False) -> dict[str, str]:
    """The environment of a child: this process's, with the package importable also where it is used from its source
    tree, and without this process's accelerators.

    Args:
        with_gpu (`bool`, *optional*, defaults to `False`):
            The child sees the first of the GPUs that this process sees. Without it, none.
    """
    environment = dict(os.environ)
    root = Path(__file__).resolve().parents[1]
    if root.name not in ("site-packages", "dist-packages"):
        paths = (str(root), environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if not with_gpu:
        return environment | NO_ACCELERATOR
    chosen = {name: environment[name] for name in VISIBLE_DEVICES if name in environment}
    chosen = chosen or {"CUDA_VISIBLE_DEVICES": "0"}  # AMD's runtime reads it too
    return environment | {name: value.partition(",")[0] for name, value in chosen.items()}
