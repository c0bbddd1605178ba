"""What services answered, kept so that nobody asks twice.

Owns the file (SQLite, values as JSON, nothing that is executed when read), its keys and the sharing of equal calls
that are under way at the same time. A failure is never kept. A cache that can't be read or written is no reason for a
call to fail: it is then as if it were empty, which is said once.

The file holds answers in plain text, customers' words included, so it is readable by its owner alone. Its keys are
hashes. No credential is part of either.
"""

import asyncio
import hashlib
import json
import logging
import os
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from salesrl_trl.errors import DeadlineExceeded, ServiceError
from salesrl_trl.reward.deadline import remaining_s
from salesrl_trl.reward.perloop import PerLoop

T = TypeVar("T")

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 2.0
"""Patience with another process that writes to the file."""
KEPT_IN_MEMORY = 20_000
"""Answers that are kept where there is no file, the latest ones: some 60 MB, and many batches."""
CLOSE_TIMEOUT_S = 1.0
"""Patience with calls that were cancelled at the end."""

_SCHEMA = "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"


def cache_key(*parts: Any) -> str:
    """A hash of everything that decides an answer. `parts` must be JSON values."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class AnswerStore:
    """JSON values by key, in a file or, without one, in memory.

    Not thread-safe: used on one event loop's thread.

    Args:
        path (`Path`, *optional*):
            The file; made when it is missing, its folder too. In memory when not given.
        keep (`int`, *optional*, defaults to `KEPT_IN_MEMORY`):
            Most values in memory, the latest ones; those that wait for `flush` count. 0 for none.
    """

    def __init__(self, path: Path | None = None, *, keep: int = KEPT_IN_MEMORY) -> None:
        self._path = path
        self._keep = keep
        self._unwritten: dict[str, Any] = {}  # without a file, everything
        self._file: sqlite3.Connection | None = None
        self._broken = False

    def get(self, key: str) -> Any:
        """The value, or `None`."""
        if key in self._unwritten or self._path is None:
            return self._unwritten.get(key)
        rows = self._try(lambda file: file.execute("SELECT value FROM answers WHERE key = ?", (key,)).fetchall())
        try:
            return json.loads(rows[0][0]) if rows else None
        except ValueError:
            return None

    def put(self, key: str, value: Any) -> None:
        """Keep a value. It is in the file after the next `flush`."""
        self._unwritten[key] = value
        while len(self._unwritten) > self._keep:
            del self._unwritten[next(iter(self._unwritten))]

    def flush(self) -> None:
        """Write what is new."""
        if self._unwritten and self._path is not None:
            new = [(key, json.dumps(value)) for key, value in self._unwritten.items()]
            if self._try(lambda file: _write(file, new)) is not None:
                self._unwritten.clear()

    def close(self) -> None:
        """Write what is new and close the file. The next use opens it again."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _try(self, use: Callable[[sqlite3.Connection], T]) -> T | None:
        if self._broken:
            return None
        try:
            if self._file is None:
                assert self._path is not None
                self._file = _open(self._path)
            return use(self._file)
        except (sqlite3.Error, OSError) as error:
            if "locked" in str(error):  # by another process, for the moment
                return None
            self._broken = True
            if self._file is not None:
                self._file.close()
                self._file = None
            logger.warning(f"the cache {self._path} is left aside: {error}. Answers are kept in memory only.")
            return None


def _open(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    file = sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        file.execute(_SCHEMA)
    except sqlite3.Error:
        file.close()
        raise
    return file


def _write(file: sqlite3.Connection, new: list[tuple[str, str]]) -> bool:
    file.execute("BEGIN IMMEDIATE")
    try:
        file.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", new)
        file.execute("COMMIT")
    except sqlite3.Error:
        file.execute("ROLLBACK")
        raise
    return True


class Memo:
    """Asks once: equal calls share one that is under way, and later ones its answer.

    Args:
        store (`AnswerStore`):
            Where answers are kept.
        to_json (`Callable[[T], Any]`), from_json (`Callable[[Any], T]`):
            The way of an answer into the store and back. `from_json` may raise `ValueError`, `TypeError` or `KeyError`
            for what another version wrote; it is then asked for again.
    """

    def __init__(self, store: AnswerStore, to_json: Callable[[Any], Any], from_json: Callable[[Any], Any]) -> None:
        self._store = store
        self._to_json = to_json
        self._from_json = from_json
        self._under_way: PerLoop[dict[str, asyncio.Task[Any]]] = PerLoop(dict)
        self._fetched: set[str] = set()  # ahead, and not used yet
        self.hits = 0
        """Answers that cost no call, since whoever reads it last set it to 0."""

    async def get(self, key: str, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer for `key`: kept, under way, or asked for now. Raises what `ask` raises."""
        kept = self._kept(key)
        if kept is not None:
            self._count(key)
            return kept  # type: ignore[no-any-return]
        under_way = self._under_way.get()
        while (task := under_way.get(key)) is not None:
            try:
                answer: T = await asyncio.shield(task)
            except ServiceError as error:
                of_the_deadline = isinstance(error, DeadlineExceeded) or error.out_of_time
                if not of_the_deadline or remaining_s() <= 0:
                    raise
                continue  # it was under way for somebody with less time
            self._count(key)
            return answer
        task = under_way[key] = asyncio.ensure_future(self._ask(key, ask))
        task.add_done_callback(lambda done: _forget(under_way, key, done))
        # Shielded, here and above: others wait for the same task, and one that is cut off must not cancel it.
        return await asyncio.shield(task)

    async def fetch(self, key: str, ask: Callable[[], Awaitable[T]]) -> None:
        """Have the answer for `key` ready, or under way, for those who will want it. Raises what `ask` raises."""
        if self._kept(key) is None and key not in self._under_way.get():
            self._fetched.add(key)
            try:
                await self.get(key, ask)
            except BaseException:  # no call was made for anybody
                self._fetched.discard(key)
                raise

    def _count(self, key: str) -> None:
        """An answer that cost no call, or the call that was made ahead for it."""
        if key in self._fetched:
            self._fetched.discard(key)
        else:
            self.hits += 1

    async def aclose(self) -> None:
        """Cancel what is under way on the running loop."""
        tasks = list(self._under_way.get().values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)

    async def _ask(self, key: str, ask: Callable[[], Awaitable[Any]]) -> Any:
        answer = await ask()
        self._store.put(key, self._to_json(answer))
        return answer

    def _kept(self, key: str) -> Any:
        value = self._store.get(key)
        try:
            return None if value is None else self._from_json(value)
        except (ValueError, TypeError, KeyError):
            return None


def _forget(under_way: dict[str, asyncio.Task[Any]], key: str, task: asyncio.Task[Any]) -> None:
    under_way.pop(key, None)
    if not task.cancelled():
        task.exception()  # seen, also where everybody who waited has been cut off
