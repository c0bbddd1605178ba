"""Copies of data files on a faster disk.

Owns the copy, and when it is made anew. Refuses to know the format of the data. The checks before a run call it.
"""

import hashlib
import os
import shutil
from pathlib import Path

from filelock import FileLock

from salesrl_trl.errors import ConfigError


def copied(path: Path, folder: Path) -> Path:
    """The copy of a file in a folder, which is made unless it is there and up to date. Copies of other files stay.

    Several processes of a machine may ask at once: one of them copies. A file that is not there is returned itself:
    whoever reads it says so. Raises `ConfigError` if it can't be read or written.
    """
    origin = path.expanduser().resolve()
    if not origin.exists():
        return path
    copy = folder.expanduser() / f"{hashlib.sha256(str(origin).encode()).hexdigest()[:12]}-{origin.name}"
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{copy}.lock"):
            if not copy.exists() or _version(copy) != _version(origin):
                _replace(copy, origin)
    except OSError as error:
        raise ConfigError(
            f"{path} could not be copied to {folder} ({error.strerror or type(error).__name__}). Expected data that "
            "can be read, and a folder with room for it and the right to write. Correct the paths, or leave out "
            "`data_copy_dir`."
        ) from None
    return copy


def _replace(copy: Path, origin: Path) -> None:
    """Copy beside the place, then move there: a copy that was interrupted is none."""
    half = copy.with_name(f"{copy.name}.half")
    shutil.copy2(origin, half)
    os.replace(half, copy)


def _version(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
