"""Process-level utilities: environment, threads' devices, and safe file writes. Standard library only."""

import contextlib
import contextvars
import ctypes
import errno
import hashlib
import importlib.metadata
import itertools
import logging
import os
import resource
import shutil
import sys
from pathlib import Path
from unittest import mock

VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")  # NVIDIA, AMD
NO_ACCELERATOR = {**dict.fromkeys(VISIBLE_DEVICES, "-1"), "JAX_PLATFORMS": "cpu"}
"""Environment variables that hide all accelerators from a process. The value is -1 because AMD's runtime reads an
empty string as all GPUs. bm25s imports JAX if installed, which reserves 75 % of every visible GPU."""

patched = mock.patch.object
"""`with patched(owner, "name", value)`: temporarily replaces an attribute of another object."""

_imported: dict[str, tuple[object, bytes]] = {}  # by module: its spec, which a reload replaces, and its file's hash
logger = logging.getLogger(__name__)


def allow_files(count: int) -> None:
    """Raise this process's limit of open files and connections to `count`, or to the machine's limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def installed(package: str) -> str | None:
    """A package's version, or `None`. Also recognises vLLM's CPU build, which has a different name."""
    for name in (package, f"{package}-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def is_in(version: object, wanted: str) -> bool:
    """Whether a version is in a range, e.g. `">=0.33"`. What isn't a version, e.g. `"dev"` of a build, is in none."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    with contextlib.suppress(InvalidVersion):  # some releases of packaging raise it
        return SpecifierSet(wanted).contains(str(version), prereleases=True)
    return False


def cache_dir() -> Path:
    """The folder shared by runs: `$SALESRL_CACHE_DIR`, or `salesrl_trl` in the user's cache folder."""
    if "SALESRL_CACHE_DIR" in os.environ:
        return Path(os.environ["SALESRL_CACHE_DIR"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "salesrl_trl"


def child_environment() -> dict[str, str]:
    """The environment for a child process: without accelerators, and able to import the package, even from source."""
    environment = dict(os.environ)
    root = Path(__file__).resolve().parents[2]
    if root.name not in ("site-packages", "dist-packages"):
        paths = (str(root), environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment | NO_ACCELERATOR


def put_aside(*paths: Path) -> tuple[Path, ...]:
    """Rename files of an earlier start, which may be absent, with a common number. Returns the new paths."""
    numbered = (tuple(path.with_stem(f"{path.stem}-{number}") for path in paths) for number in itertools.count(1))
    aside = next(some for some in numbered if not any(path.exists() for path in some))
    for path, other in zip(paths, aside, strict=True):
        if path.exists():
            path.rename(other)
    return aside


def make_private(path: Path) -> None:
    """Create a file that only its owner can read, unless it exists. SQLite's side files inherit the permissions."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def write_whole(path: Path, text: str) -> None:
    """Write a file, and create its folder if necessary. A crash leaves either the old or the new version intact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    sync(fresh)
    fresh.replace(path)
    sync(path.parent)


def put_in_place(fresh: Path, folder: Path) -> None:
    """Move `fresh` to `folder` on the same disk, replacing it if it exists. A crash, or a power failure, leaves one of
    them intact, because all files of `fresh` are synced to disk first."""
    for path in (*fresh.rglob("*"), fresh):
        sync(path)
    if not folder.exists():
        fresh.rename(folder)
    elif not _exchanged(fresh, folder):
        before = folder.with_name(f"{folder.name}.old")
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
        fresh.rename(folder)
        fresh = before
    sync(folder.parent)
    shutil.rmtree(fresh, ignore_errors=True)


def sync(path: Path) -> None:
    """Sync a file, or a folder's entries, to disk. Some network disks don't support this for folders."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _exchanged(folder: Path, other: Path) -> bool:
    """Swap two folders atomically, which Linux supports on most disks. Returns False if unsupported."""
    rename, at, exchange = getattr(ctypes.CDLL(None), "renameat2", None), -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    names = (os.fsencode(folder), os.fsencode(other))
    return rename is not None and rename(at, names[0], at, names[1], exchange) == 0


_TORCH: contextvars.ContextVar[tuple[int | None, object]] = contextvars.ContextVar("salesrl_trl_torch")


def here() -> contextvars.Context:
    """This thread's context variables and torch devices, for threads that call custom code: new threads default to GPU
    0 and the CPU."""
    context = contextvars.copy_context()
    torch = sys.modules.get("torch")
    if torch is not None:
        index = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        context.run(_TORCH.set, (index, torch.get_default_device()))
    return context


def enter() -> None:
    """Apply the context's torch devices to this thread."""
    index, default = _TORCH.get((None, None))
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if index is not None and torch.cuda.current_device() != index:
        torch.cuda.set_device(index)
    if default is not None and torch.get_default_device() != default:
        torch.set_default_device(default)


def warn_of_changes() -> None:
    """Log, once, files that have changed since this process imported them. Registers modules imported since the last
    call."""
    changed = list[str]()
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == "salesrl_trl" and (file := getattr(module, "__file__", None)):
            path = Path(file)
            now = hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b""
            spec, before = _imported.get(name, (None, b""))
            if spec is module.__spec__ and now != before:
                changed.append(name)
            _imported[name] = module.__spec__, now
    if changed:
        logger.warning(
            f"{', '.join(changed)}: the file has changed since this process imported it, but the run uses the old "
            "code. Restart the kernel, or the process, to use the new code"
        )
