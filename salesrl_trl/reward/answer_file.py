"""The file in which answers are kept: SQLite, values as JSON, nothing that is executed when read.

Owns the file, its lock, the checksums of values and the messages about it. A file that can't be read or written counts
as empty, which is logged once. No call fails or waits because of it.

The file holds answers in plain text, customers' words included, so it is readable by its owner alone. Its keys are
hashes. No credential is part of either.
"""

import contextlib
import json
import logging
import re
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from salesrl_trl.ground.process import is_locked, make_private

T = TypeVar("T")

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 0.1
"""Longest wait for another process that writes to the file. A commit takes milliseconds."""
LOCK_PAUSE_S = 1.0
"""Seconds for which a locked file counts as empty, without another look at it."""

_SCHEMA = "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"


class AnswerFile:
    """The file, used on one thread. Logs once why it can't be used.

    Args:
        path (`Path`):
            Where it is. The file is made when it is missing, its folder too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.may_be_written = True
        self._may_be_read = True
        self._locked_until = 0.0
        self._said_locked = False
        self._open: sqlite3.Connection | None = None

    def read(self, keys: Iterable[str]) -> dict[str, object]:
        """The values of those keys that are in the file."""
        found: dict[str, object] = {}
        if not self._may_be_read or time.monotonic() < self._locked_until:
            return found
        try:
            file = self._opened()
            for key in keys:
                row = file.execute("SELECT value FROM answers WHERE key = ?", (key,)).fetchone()
                with contextlib.suppress(ValueError, TypeError, RecursionError):  # no JSON: as if it were not there
                    found |= {} if row is None else {key: json.loads(_checked(key, row[0]))}
        except (sqlite3.Error, OSError) as error:
            if not self._is_locked(error):
                self._may_be_read = self.may_be_written = False
                self.close()
                logger.warning(
                    f"the cache {self.path} is left aside: {error}. Answers are kept in memory only. Delete the file, "
                    "or see to its folder."
                )
        return found

    def write(self, new: list[tuple[str, str]]) -> bool:
        """Whether these are in the file now."""
        if not self.may_be_written or not new:
            return not new
        try:
            file = self._opened()
            file.execute("BEGIN IMMEDIATE")
            try:
                summed = [(key, f"{_checksum(key, value)} {value}") for key, value in new]
                file.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", summed)
                file.execute("COMMIT")
            finally:
                if file.in_transaction:  # not where SQLite itself has rolled back, as it does on a full disk
                    file.execute("ROLLBACK")
        except (sqlite3.Error, OSError) as error:
            if not self._is_locked(error):
                self.may_be_written = False
                logger.warning(
                    f"the cache {self.path} can't be written: {error}. The run goes on: what is in the file is read, "
                    "new answers are kept in memory only. See to the disk's free space and the folder's permissions."
                )
            return False
        return True

    def use(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Run `work` on the file. Returns `None` if the file is locked or broken."""
        try:
            return work(self._opened())
        except (sqlite3.Error, OSError) as error:
            self._is_locked(error)
            return None

    def close(self) -> None:
        """Close the file. The next use opens it again."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _opened(self) -> sqlite3.Connection:
        if self._open is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            make_private(self.path)
            file = sqlite3.connect(self.path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
            try:
                file.execute(_SCHEMA)
            except sqlite3.Error:
                file.close()
                raise
            self._open = file
        return self._open

    def _is_locked(self, error: Exception) -> bool:
        """Whether another process locks the file for the moment."""
        if not is_locked(error):
            return False
        self._locked_until = time.monotonic() + LOCK_PAUSE_S
        if not self._said_locked:
            self._said_locked = True
            logger.warning(f"the cache {self.path} is locked by another process: it counts as empty while it is")
        return True


def _checksum(key: str, value: str) -> str:
    return f"{zlib.crc32(f'{key} {value}'.encode()):08x}"


def _checked(key: str, stored: str) -> str:
    """The JSON of a stored value. One of an earlier version has no checksum. Raises `ValueError` for another one."""
    if not re.match("[0-9a-f]{8} ", stored):
        return stored
    checksum, _, value = stored.partition(" ")
    if checksum != _checksum(key, value):
        raise ValueError("another value than was written")
    return value
