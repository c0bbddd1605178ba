"""Copies of local data on a faster disk.

Owns the copy, and when it is made anew. Refuses to know the format of the data: a path is a file or a folder.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from salesrl_trl.errors import ConfigError


def copied(path: Path, folder: Path) -> Path:
    """The copy of a file or a folder, which is made unless it is there and up to date.

    Several processes of a machine may ask at once: one of them copies.

    `path`: the original. If it is not there, it is returned: whoever reads it says so. `folder`: Folder of copies.
    Those of other originals stay.

    Raises:
        `ConfigError`: it can't be read or written.
    """
    origin = path.expanduser().resolve()
    if not origin.exists():
        return path
    if folder.expanduser().resolve().is_relative_to(origin):
        raise ConfigError(
            f"`data_copy_dir` {folder} lies in {path}, which is to be copied there. Expected a folder beside it. Name "
            "another, on the faster disk."
        )
    copy = folder.expanduser() / f"{hashlib.sha256(str(origin).encode()).hexdigest()[:12]}-{origin.name}"
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{copy}.lock"):
            if dict(_files(copy)) != dict(_files(origin)):
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
    for old in (half, copy):
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    (shutil.copytree if origin.is_dir() else shutil.copy2)(origin, half)
    os.replace(half, copy)


def _files(path: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Each file below a path, or the file itself, with its size and the time of its last change."""
    for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if each.is_file():
            stat = each.stat()
            yield str(each.relative_to(path)), (stat.st_size, stat.st_mtime_ns)
