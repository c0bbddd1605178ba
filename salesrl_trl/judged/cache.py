"""Each question is asked once: equal calls share one that is under way, and later ones get its answer.

The file is SQLite, for several processes; its keys are hashes. It holds customers' words, so its owner alone can read
it. A failure is never kept, and no credential.
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
from salesrl_trl.ground.process import is_locked, make_private
from salesrl_trl.service.event_loop import PerLoop, cancel, remaining_s

T = TypeVar("T")
Ask: TypeAlias = Callable[[], Awaitable[T]]
Check: TypeAlias = Callable[[T], None]

logger = logging.getLogger(__name__)

MAX_IN_MEMORY = 20_000  # answers that are kept without a file, the latest ones: about 60 MB, and many batches
WRITE_AFTER_S = 0.1  # seconds from a new value to its way into the file. Values that come meanwhile go along.
LOOK_UP_TIMEOUT_S = 1.0  # longest wait for a disk that does not answer
LAST_WRITE_TIMEOUT_S = 5.0  # longest wait for a slow disk at the end
LOCK_TIMEOUT_S = 0.1  # longest wait for another process that writes to the file. A commit takes milliseconds.
LOCK_PAUSE_S = 1.0  # seconds for which a file that is locked or late counts as empty, without another look at it
FAULT_PAUSE_S = 60.0  # the same for a file that can't be used for another reason, such as a full disk

_SCHEMA = "CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"


def cache_key(*parts: object) -> str:
    """A hash of everything that decides an answer. `parts` must be JSON values."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class AnswerStore:
    """JSON values by key, in a file or, without one, in memory: the latest `most` of them.

    A thread reads and writes the file, so that no disk holds up the event loop. (`aiosqlite` does not serve here: a
    connection that nobody closed keeps the process from ending.) A file that can't be used now counts as empty for a
    while, which is logged once. No call fails because of it, and none waits for a process that locks it.
    """

    def __init__(self, path: Path | None = None, most: int = MAX_IN_MEMORY) -> None:
        self.path = path
        self._most = most
        self._memory: dict[str, object] = {}  # what is not in the file yet; without a file, everything
        self._writing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cache")
        self._connection: sqlite3.Connection | None = None
        self._unusable_until = math.inf if path is None else 0.0  # by `time.monotonic`
        self._logged: set[str] = set()  # faults that were logged

    def __reduce__(self) -> tuple[object, ...]:
        return AnswerStore, (self.path, self._most)

    async def get(self, key: str) -> object:
        """The value, or `None`. Waits at most `LOOK_UP_TIMEOUT_S` for the disk."""
        if key in self._memory:
            return self._memory[key]
        rows = await self._run("SELECT value FROM kept WHERE key = ?", key)
        with contextlib.suppress(ValueError, TypeError, RecursionError):  # another version may have written it
            return json.loads(rows[0][0]) if rows else None
        return None

    def put(self, key: str, value: object) -> None:
        """Keep a value. It is in the file within a second: a call is paid for, and a run may be killed at any time."""
        self._memory.pop(key, None)
        self._memory[key] = value
        while len(self._memory) > self._most:
            del self._memory[next(iter(self._memory))]
        if self.path is not None and (self._writing is None or self._writing.done()):
            self._writing = asyncio.ensure_future(self._write_all())

    async def aclose(self) -> None:
        """Write what is new and close the file. The next use opens it again."""
        if self._writing is not None:
            self._writing.cancel()
        self._writing = None
        self._unusable_until = math.inf if self.path is None else 0.0  # a last try
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WRITE_TIMEOUT_S):
                if self._memory:
                    await self._write()
                await asyncio.wrap_future(self._thread.submit(self._disconnect))
        self._connection = None
        self._thread.shutdown(wait=False)  # it may wait for a disk
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
        """The rows of one statement, which is a transaction of its own. `None` if the file can't be used now."""
        if time.monotonic() < self._unusable_until:
            return None
        running = asyncio.wrap_future(self._thread.submit(self._execute, statement, values))
        timeout_s = LOOK_UP_TIMEOUT_S if statement.startswith("SELECT") else None
        if not (await asyncio.wait({running}, timeout=timeout_s))[0]:
            self._leave_aside(TimeoutError())
            return None
        return running.result()

    def _leave_aside(self, error: Exception) -> None:
        pause_s = LOCK_PAUSE_S if is_locked(error) or isinstance(error, TimeoutError) else FAULT_PAUSE_S
        self._unusable_until = time.monotonic() + pause_s
        fault = str(error) or "its disk does not answer"
        if fault not in self._logged:
            self._logged.add(fault)
            logger.warning(
                f"the cache {self.path} counts as empty: {fault}. Answers are kept in memory; it is tried again every "
                f"{pause_s:g} s. If it stays so, delete it, or see to its folder and the disk's free space."
            )

    # On the file's thread

    def _execute(self, statement: str, values: tuple[str, ...]) -> list[tuple[str, ...]] | None:
        if time.monotonic() < self._unusable_until:  # a statement before this one has shown it
            return None
        try:
            return (self._connection or self._connect()).execute(statement, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            self._leave_aside(error)
            self._disconnect()  # the file may be another one the next time
            return None

    def _connect(self) -> sqlite3.Connection:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        make_private(self.path)
        self._connection = sqlite3.connect(
            self.path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        self._connection.execute(_SCHEMA)
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class Cache(Generic[T]):
    """Asks once: equal calls share one that is under way, and later ones get its answer.

    `form` makes JSON of an answer, and an answer of JSON. An answer whose stored value another version wrote is asked
    for again, and replaces that value.
    """

    def __init__(self, store: AnswerStore, form: TypeAdapter[T]) -> None:
        self._store = store
        self._form = form
        self._under_way: PerLoop[dict[str, asyncio.Task[T]]] = PerLoop(dict)
        self.hits = 0  # answers that were used, less those that were asked for. The reader sets it back to 0.

    async def get(self, key: str, ask: Ask[T], check: Check[T] | None = None) -> T:
        """The answer for `key`: kept, under way, or asked for now. Raises what `ask` raises. `check` refuses, by
        `ValueError` or `ServiceError`, an answer that is not to be kept, or not to be used if it was."""
        answer = await self.fetch(key, ask, check)
        self.hits += 1
        return answer

    async def fetch(self, key: str, ask: Ask[T], check: Check[T] | None = None) -> T:
        """As `get`, ahead of those who need the answer."""
        under_way = self._under_way.get()

        def forget(task: asyncio.Task[T]) -> None:
            under_way.pop(key, None)
            if not task.cancelled():
                task.exception()  # marked as seen: all who waited may have been cut off

        while (task := under_way.get(key)) is not None:
            try:
                return await asyncio.shield(task)
            except DeadlineExceeded:  # that call had less time than this one
                if remaining_s() <= 0:
                    raise
        task = under_way[key] = asyncio.ensure_future(self._ask(key, ask, check))
        task.add_done_callback(forget)
        return await asyncio.shield(task)  # others wait for it too, and one that is cut off must not cancel it

    async def aclose(self) -> None:
        """Cancel what is under way on the running loop."""
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
