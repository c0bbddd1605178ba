"""Answer cache: equal concurrent calls share one request, and later calls reuse its answer.

The file is a SQLite database shared by processes, keyed by hashes. It contains customers' words, so only its owner can
read it. Failures and credentials are never stored.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import sqlite3
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from pydantic import TypeAdapter

from salesrl_trl.errors import DeadlineExceeded, ServiceError
from salesrl_trl.ground.local_disk import LocalFile
from salesrl_trl.ground.process import make_private
from salesrl_trl.service.event_loop import PerLoop, cancel, remaining_s, retrieve

T = TypeVar("T")
Ask: TypeAlias = Callable[[], Awaitable[T]]
Check: TypeAlias = Callable[[T], None]

logger = logging.getLogger(__name__)

MAX_IN_MEMORY = 20_000  # most answers kept in memory without a file, latest first: about 60 MB, many batches
WRITE_AFTER_S = 0.1  # delay before new values are written, to batch them
LOOK_UP_TIMEOUT_S = 1.0  # longest wait for an unresponsive disk
LAST_WRITE_TIMEOUT_S = 5.0  # longest wait for a slow disk on close
LOCK_TIMEOUT_S = 0.1  # longest wait for another process's commit, usually milliseconds
LOCK_PAUSE_S = 1.0  # seconds for which a locked or slow file counts as empty
FAULT_PAUSE_S = 60.0  # the same after other faults, such as a full disk

_SCHEMA = "CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"


def cache_key(*parts: object) -> str:
    """A hash of everything that determines an answer. `parts` are JSON values."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class AnswerStore:
    """JSON values by key in a file or, without one, the latest `most` in memory.

    A thread accesses the file, so the disk never blocks the event loop. (`aiosqlite` is unsuitable: an unclosed
    connection keeps the process alive.) An unusable file counts as empty for a while, logged once; no call fails
    because of it or waits for another process's lock.
    """

    def __init__(self, path: Path | None = None, most: int = MAX_IN_MEMORY) -> None:
        self.path = path
        self._most = most
        self._memory: dict[str, object] = {}  # values not yet in the file; without a file, all values
        self._writing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cache")
        self._connection: sqlite3.Connection | None = None
        self._unusable_until = math.inf if path is None else 0.0  # by `time.monotonic`
        self._logged: set[str] = set()  # faults already logged

    def __reduce__(self) -> tuple[object, ...]:
        return AnswerStore, (self.path, self._most)

    async def get(self, key: str) -> object:
        """The value or `None`, after at most `LOOK_UP_TIMEOUT_S`."""
        if key in self._memory:
            return self._memory[key]
        rows = await self._run("SELECT value FROM kept WHERE key = ?", key)
        with contextlib.suppress(ValueError, TypeError, RecursionError):  # possibly written by another version
            return json.loads(rows[0][0]) if rows else None
        return None

    def put(self, key: str, value: object) -> None:
        """Store a value. It reaches the file within a second: calls cost money, and a run may be killed."""
        self._memory.pop(key, None)
        self._memory[key] = value
        while len(self._memory) > self._most:
            del self._memory[next(iter(self._memory))]
        if self.path is not None and (self._writing is None or self._writing.done()):
            self._writing = asyncio.ensure_future(self._write_all())

    async def aclose(self) -> None:
        """Write new values and close the file. The next use reopens it."""
        if self._writing is not None:
            self._writing.cancel()
        self._writing = None
        self._unusable_until = math.inf if self.path is None else 0.0  # try once more
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WRITE_TIMEOUT_S):
                if self._memory:
                    await self._write()
                await asyncio.wrap_future(self._thread.submit(self._finish))
        self._connection = None
        self._thread.shutdown(wait=False)  # it may be blocked on a disk
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cache")

    async def _write_all(self) -> None:
        while self._memory:
            await asyncio.sleep(WRITE_AFTER_S)
            await self._write()

    async def _write(self) -> None:
        if time.monotonic() < self._unusable_until:
            return
        new = dict(self._memory)
        stored = json.dumps({key: json.dumps(value) for key, value in new.items()})
        if await self._run("INSERT OR REPLACE INTO kept SELECT key, value FROM json_each(?)", stored) is not None:
            for key, value in new.items():
                if self._memory.get(key) is value:
                    del self._memory[key]

    async def _run(self, statement: str, *values: str) -> list[tuple[str, ...]] | None:
        """Run one statement as its own transaction. Returns its rows, or `None` while the file is unusable."""
        if time.monotonic() < self._unusable_until:
            return None
        running = asyncio.wrap_future(self._thread.submit(self._execute, statement, values))
        timeout_s = LOOK_UP_TIMEOUT_S if statement.startswith("SELECT") else None
        if not (await asyncio.wait({running}, timeout=timeout_s))[0]:
            self._leave_aside(TimeoutError())
            return None
        return running.result()

    def _leave_aside(self, error: Exception) -> None:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary code; higher bytes hold details
        is_brief = isinstance(error, TimeoutError) or code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        pause_s = LOCK_PAUSE_S if is_brief else FAULT_PAUSE_S
        self._unusable_until = time.monotonic() + pause_s
        fault = str(error) or "its disk does not answer"
        if fault not in self._logged:
            self._logged.add(fault)
            logger.warning(
                f"the cache {self.path} counts as empty: {fault}. Answers are kept in memory; it is retried every "
                f"{pause_s:g} s. If this persists, delete it, or check its folder and the disk's free space."
            )

    # On the file's thread

    def _execute(self, statement: str, values: tuple[str, ...]) -> list[tuple[str, ...]] | None:
        if time.monotonic() < self._unusable_until:  # an earlier statement failed
            return None
        try:
            connection = self._connection or self._connect()
            rows = connection.execute(statement, values).fetchall()
            self._place.copy(connection)
            return rows
        except (sqlite3.Error, OSError) as error:
            self._leave_aside(error)
            self._disconnect()  # the file may be replaced before the next attempt
            return None

    def _connect(self) -> sqlite3.Connection:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._place = LocalFile(self.path)
        make_private(self._place.file)
        self._connection = sqlite3.connect(
            self._place.file, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        self._connection.execute(_SCHEMA)
        return self._connection

    def _finish(self) -> None:
        is_copied = self._connection is not None and self._place.copy(self._connection, now=True)
        self._disconnect()
        if is_copied:
            self._place.discard()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class Cache(Generic[T]):
    """Equal concurrent calls share one request, and later calls reuse its answer.

    `form` converts answers to and from JSON. A stored value it can't read, e.g. from another version, is requested
    again and replaced.
    """

    def __init__(self, store: AnswerStore, form: TypeAdapter[T]) -> None:
        self._store = store
        self._form = form
        self._under_way: PerLoop[dict[str, asyncio.Task[T]]] = PerLoop(dict)
        self.hits = 0  # answers used minus answers requested; the reader resets it

    async def get(self, key: str, ask: Ask[T], check: Check[T] | None = None) -> T:
        """The answer for `key`: stored, pending or requested now. Raises what `ask` raises. `check` raises
        `ValueError` or `ServiceError` for an answer that must not be stored or, once stored, reused."""
        answer = await self.fetch(key, ask, check)
        self.hits += 1
        return answer

    async def fetch(self, key: str, ask: Ask[T], check: Check[T] | None = None) -> T:
        """As `get`, ahead of the callers who need the answer."""
        under_way = self._under_way.get()

        while (task := under_way.get(key)) is not None:
            try:
                return await asyncio.shield(task)
            except DeadlineExceeded:  # its deadline was shorter than this one
                if remaining_s() <= 0:
                    raise
        task = under_way[key] = asyncio.ensure_future(self._ask(key, ask, check))
        task.add_done_callback(lambda _: under_way.pop(key, None))
        task.add_done_callback(retrieve)  # every waiter may have been cancelled
        return await asyncio.shield(task)  # others wait for it too; a cancelled waiter must not cancel it

    async def aclose(self) -> None:
        """Cancel the running loop's pending requests."""
        await cancel(self._under_way.get().values())

    async def _ask(self, key: str, ask: Ask[T], check: Check[T] | None) -> T:
        kept = self._read(await self._store.get(key), check)
        if kept is not None:
            return kept
        answer = await ask()
        self.hits -= 1
        value = self._form.dump_python(answer, warnings=False)  # a warning would quote it
        if self._read(value, check) is not None:
            self._store.put(key, value)
        return answer

    def _read(self, value: object, check: Check[T] | None) -> T | None:
        if value is None:
            return None
        try:
            answer = self._form.validate_python(value)
            if check is not None:
                check(answer)
        except (ValueError, TypeError, KeyError, ServiceError):
            return None
        return answer
