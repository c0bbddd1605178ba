"""What a process keeps on the host: freed blocks, garbage for a while, and the mapping of packages. Standard library
only."""

import atexit
import ctypes
import functools
import gc
import importlib.metadata
import sys

_GC_THRESHOLDS = (50_000, 20, 100)  # new objects, then rounds, between collections of each generation
_GC_USUAL = gc.get_threshold()


def keep_freed_memory() -> None:
    """Make glibc reuse large freed blocks instead of returning them to the kernel, which would map and clear every
    page again: half of a step's time on a CPU. In exchange, the process keeps its peak memory."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: never


def collect_seldom() -> None:
    """Exclude all existing objects from garbage collection, and collect others rarely, until the process exits.
    Otherwise collections used a third of the CPU time of a reward batch with a thousand calls in flight. Everything is
    collected at exit, as Triton would print a page about leftovers."""
    atexit.unregister(collect_as_usual)
    atexit.register(collect_as_usual)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def collect_as_usual() -> None:
    gc.unfreeze()
    gc.set_threshold(*_GC_USUAL)


def remember_packages() -> None:
    """Cache the mapping of modules to packages, which transformers and TRL request often, at 0.3 to 0.7 s each, and
    the packages' metadata, which accelerate parses several times a step, at 1 to 2 ms each."""
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    importlib.metadata.packages_distributions = functools.cache(importlib.metadata.packages_distributions)
    importlib.metadata.version = functools.cache(importlib.metadata.version)
