"""SQLite files of runs whose folder is on a network file system, where SQLite's locks and shared memory don't work.

Such a file is written on the local disk, and copied to its place from time to time and at the end.
"""

import functools
import hashlib
import logging
import os
import re
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import psutil

from salesrl_trl.ground.process import cache_dir, make_private

logger = logging.getLogger(__name__)
_log_once = functools.cache(logger.log)  # a file is reopened after a fault

NETWORK = re.compile(
    r"9p|afs|beegfs|ceph|cifs|glusterfs|gpfs|lustre|nfs4?|pvfs2|smb(?:2|3|fs)|wekafs|fuse\.(?!fuse-overlayfs).+"
)
"""File systems, including FUSE except for the layers of containers."""
LEAST_PAUSE_S = 60.0
PAUSES_PER_COPY = 20  # a copy's duration times this passes before the next one


def is_remote(folder: Path) -> bool:
    """Whether a folder, existing or not, is on a network file system."""
    folder, mount = folder.resolve(), ("", "")
    for part in psutil.disk_partitions(all=True):
        if folder.is_relative_to(part.mountpoint):
            # the longest, and of those at one place the last one mounted
            mount = (part.mountpoint, part.fstype) if len(part.mountpoint) >= len(mount[0]) else mount
    return NETWORK.fullmatch(mount[1]) is not None


class LocalFile:
    """Where the SQLite file `path` is written: `file`, which equals `path` on a local disk. On a network file system
    it continues what is at `path`, or a newer version that a killed run left on this machine. One process uses it."""

    def __init__(self, path: Path) -> None:
        self.path = self.file = path
        self._has_failed = False
        self._next = time.monotonic() + LEAST_PAUSE_S
        if not is_remote(path.parent):
            return
        folder = cache_dir() / "databases" / hashlib.sha256(os.fsencode(path.parent.resolve())).hexdigest()[:16]
        if is_remote(folder):
            _log_once(
                logging.WARNING,
                f"{path} is on a network file system, which SQLite does not support, and so is {folder}. Set "
                "`SALESRL_CACHE_DIR` to a local folder",
            )
            return
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.file = folder / path.name
        _log_once(logging.INFO, f"{path} is on a network file system: written to {self.file}, copied at intervals")
        times = [side.stat().st_mtime for side in self._sides() if side.exists()]
        if path.exists() and path.stat().st_mtime > max(times, default=0.0):
            self.discard()
            fresh = self.file.with_name(f"{self.file.name}.copy")
            make_private(fresh)
            shutil.copyfile(path, fresh)
            os.replace(fresh, self.file)  # a kill leaves no half of a file, which would be the newer one

    def copy(self, connection: sqlite3.Connection, *, now: bool = False) -> bool:
        """Copy the file to its place if it is time, or `now`. A crash leaves the old or the new copy there. Returns
        `False`, and logs it once, if that failed: the local file has everything."""
        started = time.monotonic()
        if self.file == self.path or (started < self._next and not now):
            return True
        try:
            self._copy(connection)
        except (OSError, sqlite3.Error) as error:
            if not self._has_failed:
                logger.warning(f"{self.file} can't be copied to {self.path} ({error}). It is retried")
            self._has_failed = True
        else:
            self._has_failed = False
        self._next = time.monotonic() + max(LEAST_PAUSE_S, PAUSES_PER_COPY * (time.monotonic() - started))
        return not self._has_failed

    def _copy(self, connection: sqlite3.Connection) -> None:
        fresh, part = self.file.with_name(f"{self.file.name}.copy"), self.path.with_name(f".{self.path.name}.part")
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in (fresh, part):
            each.unlink(missing_ok=True)
            make_private(each)
        with closing(sqlite3.connect(fresh)) as target:
            connection.backup(target)
            target.execute("PRAGMA journal_mode = DELETE")  # readers of a copy in WAL mode would need shared memory
        shutil.copyfile(fresh, part)
        os.replace(part, self.path)
        fresh.unlink()

    def discard(self) -> None:
        """Remove the local version. Its content is at `path`."""
        if self.file != self.path:
            for side in self._sides():
                side.unlink(missing_ok=True)

    def _sides(self) -> list[Path]:
        return [Path(f"{self.file}{end}") for end in ("", "-wal", "-shm", "-journal")]
