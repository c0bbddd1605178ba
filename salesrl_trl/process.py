"""Settings of one process: memory, open files, the environment of its children, the folder of cached files, and the
files of earlier starts; versions of installed packages.

Owns these settings only. Does not start children. Standard library only.
"""

import contextlib
import ctypes
import functools
import gc
import importlib.metadata
import itertools
import os
import resource
import sys
from pathlib import Path

VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Environment variables that choose the GPUs of a process, for NVIDIA and AMD."""
NO_ACCELERATOR = {**dict.fromkeys(VISIBLE_DEVICES, "-1"), "JAX_PLATFORMS": "cpu"}
"""Environment variables for a process without accelerators. The value is -1, because AMD's runtime reads an empty
string as all GPUs. bm25s imports JAX if it is installed, and JAX takes 75 % of every GPU that it sees."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = 2**31 - 1

_GC_THRESHOLDS = (50_000, 20, 100)
"""New objects, then rounds, between two collections of each generation. Python's default: 700, 10, 10."""
_GC_USUAL = gc.get_threshold()


def keep_freed_memory() -> None:
    """Let glibc reuse freed blocks instead of returning each large one to the kernel.

    Training on a CPU frees and takes tens of megabytes hundreds of times a step. By default the kernel maps and clears
    every page anew. On two cores, this was half of the time of a step of fine-tuning (1.86 against 3.36 steps a
    second). In exchange, the process keeps its peak memory. Without glibc this does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)


def collect_seldom() -> None:
    """Exclude all present objects from garbage collection, and collect the others seldom.

    The objects of a run live as long as the run. With a thousand calls in flight, the collector's walks over them took
    a third of the CPU time of a reward batch (0.86 against 0.55 ms a call).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def collect_as_usual() -> None:
    """Undo `collect_seldom`."""
    gc.unfreeze()
    gc.set_threshold(*_GC_USUAL)


def remember_packages() -> None:
    """Let the map from modules to packages be made once: transformers and TRL ask for it, 0.3 to 0.7 s each."""
    importlib.metadata.packages_distributions = functools.cache(importlib.metadata.packages_distributions)


def allow_files(count: int) -> None:
    """Allow this process that many open files and connections, up to the machine's limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def installed(package: str) -> str | None:
    """A package's version, or `None`. vLLM's build for a CPU has another name."""
    for name in (package, f"{package}-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def cache_dir() -> Path:
    """The folder of files that runs share: `$SALESRL_CACHE_DIR`, or `salesrl_trl` in the user's cache folder."""
    if "SALESRL_CACHE_DIR" in os.environ:
        return Path(os.environ["SALESRL_CACHE_DIR"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "salesrl_trl"


def child_environment() -> dict[str, str]:
    """The environment of a child process: a copy of this one, without its accelerators.

    The child can import the package, also from a source tree.
    """
    environment = dict(os.environ)
    root = Path(__file__).resolve().parents[1]
    if root.name not in ("site-packages", "dist-packages"):
        paths = (str(root), environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment | NO_ACCELERATOR


def put_aside(*paths: Path) -> tuple[Path, ...]:
    """Rename existing files to ones with a number, so that the files of an earlier start are kept.

    All get the same number, even if some are absent. Returns the new paths.
    """

    def numbered(number: int) -> tuple[Path, ...]:
        return tuple(path.with_stem(f"{path.stem}-{number}") for path in paths)

    aside = next(some for some in map(numbered, itertools.count(1)) if not any(path.exists() for path in some))
    for path, other in zip(paths, aside, strict=True):
        if path.exists():
            path.rename(other)
    return aside


def write_whole(path: Path, text: str) -> None:
    """Write a file, and its folder if need be. A process that is cut off leaves the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)
