"""Each question is asked once: equal calls share one that is under way, and later ones get its answer.

The file is SQLite, for several processes; its keys are hashes. It holds customers' words, so its owner alone can read
it. A thread reads and writes it, so that no disk holds up the event loop. (`aiosqlite` does not serve here: a
connection that nobody closed keeps the process from ending.) A failure is never kept, and no credential.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import sqlite3
import time
import zlib
from collections.abc import Awaitable, Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from salesrl_trl.errors import DeadlineExceeded, ServiceError
from salesrl_trl.ground.process import is_locked, make_private
from salesrl_trl.service.event_loop import PerLoop, cancel, remaining_s

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_IN_MEMORY = 20_000  # answers that are kept without a file, the latest ones: about 60 MB, and many batches
WRITE_AFTER_S = 0.1  # seconds from a new value to its way into the file. Values that come meanwhile go along.
LOOK_UP_TIMEOUT_S = 1.0  # longest wait for a disk that does not answer
LAST_WRITE_TIMEOUT_S = 5.0  # longest wait for a locked file, or a slow disk, at the end
LOCK_TIMEOUT_S = 0.1  # longest wait for another process that writes to the file. A commit takes milliseconds.
LOCK_PAUSE_S = 1.0  # seconds for which a file that is locked or late counts as empty, without another look at it
FAULT_PAUSE_S = 60.0  # the same for a file that can't be used for another reason, such as a full disk
CHANGE_ATTEMPTS = 20  # attempts at a change that can't wait, while another process locks the file

_SCHEMA = "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"
_IN_LIST = "key IN (SELECT value FROM json_each(?))"


def cache_key(*parts: object) -> str:
    """A hash of everything that decides an answer. `parts` must be JSON values."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class AnswerStore:
    """JSON values by key, in a file or, without one, in memory: the latest `most` of them. No call waits for another
    process that locks the file."""

    def __init__(self, path: Path | None = None, *, most: int = MAX_IN_MEMORY) -> None:
        self.path = path
        self._most = most
        self._memory: dict[str, object] = {}  # what is not in the file yet; without a file, everything
        self._file = AnswersFile(path)
        self._wanted: set[str] = set()  # keys for the next look-up
        self._look_up: asyncio.Task[dict[str, object]] | None = None
        self._writing: asyncio.Task[None] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return partial(AnswerStore, most=self._most), (self.path,)

    async def get(self, key: str) -> object:
        """The value, or `None`. Waits at most `LOOK_UP_TIMEOUT_S` for the disk."""
        if key in self._memory or not self._file.is_readable:
            return self._memory.get(key)

        async def read_wanted() -> dict[str, object]:
            wanted, self._wanted, self._look_up = self._wanted, set(), None
            rows = await self._file.run(f"SELECT key, value FROM answers WHERE {_IN_LIST}", json.dumps(list(wanted)))
            return {key: _without_checksum(key, stored) for key, stored in rows or ()}

        self._wanted.add(key)
        if self._look_up is None or self._look_up.done():  # by the end of an event loop
            self._look_up = asyncio.ensure_future(read_wanted())
        return (await asyncio.shield(self._look_up)).get(key)

    def put(self, key: str, value: object) -> None:
        """Keep a value. It is in the file within a second: a call is paid for, and a run may be killed at any time."""
        self._memory.pop(key, None)
        self._memory[key] = value
        while len(self._memory) > self._most:
            del self._memory[next(iter(self._memory))]
        if self._file.is_writable and (self._writing is None or self._writing.done()):
            self._writing = asyncio.ensure_future(self._write(WRITE_AFTER_S))

    async def get_or_put(self, key: str, value: object) -> object:
        """The value in the file. If it has none, or a damaged one, `value` is put there; of several processes, the
        first one's stays. `None` if the file can't be used now."""
        kept = await self.get(key)
        for conflict in ("IGNORE", "REPLACE"):
            if kept is None and self._file.is_readable:
                stored = _with_checksum(key, value)
                await self._file.run(f"INSERT OR {conflict} INTO answers VALUES (?, ?)", key, stored)
                kept = await self.get(key)
        return kept

    async def replace(self, key: str, old: object, new: object) -> bool:
        """Put `new` in the place of `old`, if that is still there. Returns whether the file could be written."""
        values = (_with_checksum(key, new), key, _with_checksum(key, old))
        return await self._file.change("UPDATE answers SET value = ? WHERE key = ? AND value = ?", *values)

    async def known(self, keys: Collection[str]) -> set[str]:
        rows = await self._file.run(f"SELECT key FROM answers WHERE {_IN_LIST}", json.dumps(list(keys)))
        return {key for (key,) in rows or ()}

    async def forget(self, keys: Iterable[str]) -> None:
        await self._file.change(f"DELETE FROM answers WHERE {_IN_LIST}", json.dumps(list(keys)))

    async def aclose(self) -> None:
        """Write what is new and close the file. The next use opens it again."""
        if self._writing is not None:
            self._writing.cancel()
        self._look_up = self._writing = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WRITE_TIMEOUT_S):
                await self._write(0.0)
                await self._file.aclose()
        self._file.leave()

    async def _write(self, pause_s: float) -> None:
        """Write what is in memory alone, after a pause, until nothing is left."""
        while self._memory and self._file.is_writable:
            await asyncio.sleep(pause_s)
            new = dict(self._memory)
            stored = json.dumps({key: _with_checksum(key, value) for key, value in new.items()})
            statement = "INSERT OR REPLACE INTO answers SELECT key, value FROM json_each(?)"
            if await self._file.run(statement, stored) is None:
                await asyncio.sleep(WRITE_AFTER_S)  # another process locks the file
                continue
            for key, value in new.items():
                if self._memory.get(key) is value:
                    del self._memory[key]


class AnswersFile:
    """The SQLite file, which one thread reads and writes. One that can't be read or written counts as empty, which is
    logged once, and is tried again later. No statement fails because of it."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cache")
        self._connection: sqlite3.Connection | None = None
        # until when the file counts as empty, and until when nothing is written to it, by `time.monotonic`
        self._unreadable_until = self._unwritable_until = math.inf if path is None else 0.0
        self._is_stale = False  # whether the connection had a fault: the file may be another one the next time
        self._logged: set[str] = set()  # faults that were logged

    @property
    def is_readable(self) -> bool:
        return time.monotonic() >= self._unreadable_until

    @property
    def is_writable(self) -> bool:
        return time.monotonic() >= self._unwritable_until

    async def aclose(self) -> None:
        """Close the file behind what was asked of it. The next use opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await asyncio.wrap_future(self._thread.submit(connection.close))

    def leave(self) -> None:
        """Take another thread: this one may wait for a disk."""
        thread, self._thread = self._thread, ThreadPoolExecutor(max_workers=1, thread_name_prefix="cache")
        thread.shutdown(wait=False)

    async def change(self, statement: str, *values: str) -> bool:
        """Whether the file was changed. Tries again while another process locks it."""
        for _ in range(CHANGE_ATTEMPTS):
            if await self.run(statement, *values) is not None:
                return True
            if not self.is_writable:
                break
        return False

    async def run(self, statement: str, *values: str) -> list[tuple[str, ...]] | None:
        """The rows of one statement, which is a transaction of its own. `None` if the file can't be used now."""
        is_look_up = statement.startswith("SELECT")
        if not (self.is_readable if is_look_up else self.is_writable):
            return None
        running = asyncio.wrap_future(self._thread.submit(self._execute, statement, values))
        await asyncio.wait({running}, timeout=LOOK_UP_TIMEOUT_S if is_look_up else None)
        result = running.result() if running.done() else TimeoutError()
        if isinstance(result, Exception):
            self._note(result, is_look_up)
            return None
        return result

    def _note(self, error: Exception, is_look_up: bool) -> None:
        """Decide how long the file is not used, and for what. Log each fault once."""
        is_busy = is_locked(error) or isinstance(error, TimeoutError)
        until = time.monotonic() + (LOCK_PAUSE_S if is_busy else FAULT_PAUSE_S)
        if is_busy:
            self._unreadable_until = until
            who = "is locked by another process" if is_locked(error) else "lies on a disk that does not answer"
            fault = f"{who}: it counts as empty while it is so"
        elif is_look_up or self._connection is None:
            self._unreadable_until = self._unwritable_until = until
            fault = (
                f"is left aside: {error}. Answers are kept in memory; it is tried again every {FAULT_PAUSE_S:g} s. "
                "Delete it, or see to its folder."
            )
        else:
            self._unwritable_until = until
            fault = (
                f"can't be written: {error}. The run goes on: what is in the file is read, new answers are kept in "
                f"memory. The file is tried again every {FAULT_PAUSE_S:g} s. See to the disk's free space and the "
                "folder's permissions."
            )
        if fault not in self._logged:
            self._logged.add(fault)
            logger.warning(f"the cache {self.path} {fault}")
        self._is_stale = not is_busy

    # On the file's thread

    def _execute(self, statement: str, values: tuple[str, ...]) -> list[tuple[str, ...]] | Exception:
        try:
            if self._is_stale and self._connection is not None:
                self._connection.close()
                self._connection = None
            if self._connection is None:
                self._connection, self._is_stale = self._connect(), False
            return self._connection.execute(statement, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            return error

    def _connect(self) -> sqlite3.Connection:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        make_private(self.path)
        connection = sqlite3.connect(self.path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        connection.text_factory = lambda stored: stored.decode(errors="replace")  # its checksum tells the damage
        try:
            connection.execute(_SCHEMA)
        except sqlite3.Error:
            connection.close()
            raise
        return connection


def _with_checksum(key: str, value: object) -> str:
    text = json.dumps(value)
    return f"{zlib.crc32(f'{key} {text}'.encode()):08x} {text}"


def _without_checksum(key: str, stored: object) -> object:
    """The value; `None` if it is another one than was written, such as a BLOB."""
    if not isinstance(stored, str):
        return None
    try:
        value: object = json.loads(stored.partition(" ")[2])
    except (ValueError, RecursionError):
        return None
    return value if stored == _with_checksum(key, value) else None


class Cache(Generic[T]):
    """Asks once: equal calls share one that is under way, and later ones get its answer.

    `from_json` makes the answer of a stored value again. It raises `ValueError`, `TypeError` or `KeyError` for a value
    that another version wrote. The answer is then asked for again, and replaces that value.
    """

    def __init__(self, store: AnswerStore, to_json: Callable[[T], object], from_json: Callable[[object], T]) -> None:
        self._store = store
        self._to_json = to_json
        self._from_json = from_json
        self._under_way: PerLoop[dict[str, asyncio.Task[tuple[T, bool]]]] = PerLoop(dict)
        self._fetched: set[str] = set()  # ahead, and not used yet
        self.hits = 0  # answers that cost no call. The reader sets it back to 0.

    async def get(
        self, key: str, ask: Callable[[], Awaitable[T]], check: Callable[[T], object] = lambda answer: None
    ) -> T:
        """The answer for `key`: kept, under way, or asked for now. Raises what `ask` raises. `check` refuses, by
        `ValueError` or `ServiceError`, an answer that is not to be kept, or not to be used if it was."""
        answer, saved = await self._obtain(key, ask, check)
        if saved and key not in self._fetched:
            self.hits += 1
        if saved:  # the first use of an answer that was fetched ahead saves no call
            self._fetched.discard(key)
        return answer

    async def fetch(
        self, key: str, ask: Callable[[], Awaitable[T]], check: Callable[[T], object] = lambda answer: None
    ) -> None:
        """Ask for the answer of `key` ahead of those who need it. Raises what `ask` raises."""

        async def ahead() -> T:
            self._fetched.add(key)
            try:
                return await ask()
            except BaseException:  # no call that a later one could have saved
                self._fetched.discard(key)
                raise

        if key not in self._under_way.get():
            await self._obtain(key, ahead, check)

    async def aclose(self) -> None:
        """Cancel what is under way on the running loop."""
        await cancel(self._under_way.get().values())

    async def _obtain(self, key: str, ask: Callable[[], Awaitable[T]], check: Callable[[T], object]) -> tuple[T, bool]:
        """The answer, and whether it cost no call."""
        under_way = self._under_way.get()
        while (task := under_way.get(key)) is not None:
            try:
                return (await asyncio.shield(task))[0], True
            except ServiceError as error:
                of_the_deadline = isinstance(error, DeadlineExceeded) or error.out_of_time
                if not of_the_deadline or remaining_s() <= 0:
                    raise
                # that call had less time than this one
        task = under_way[key] = asyncio.ensure_future(self._ask(key, ask, check))
        task.add_done_callback(partial(_forget, under_way, key))
        # Shielded, here and above: others wait for the same task, and one that is cut off must not cancel it.
        return await asyncio.shield(task)

    async def _ask(self, key: str, ask: Callable[[], Awaitable[T]], check: Callable[[T], object]) -> tuple[T, bool]:
        kept = self._read(await self._store.get(key), check)
        if kept is not None:
            return kept, True
        answer = await ask()
        value = self._to_json(answer)
        if self._read(value, check) is not None:
            self._store.put(key, value)
        return answer, False

    def _read(self, value: object, check: Callable[[T], object]) -> T | None:
        try:
            answer: T | None = None if value is None else self._from_json(value)
            if answer is not None:
                check(answer)
            return answer
        except (ValueError, TypeError, KeyError, ServiceError):
            return None


def _forget(under_way: dict[str, asyncio.Task[T]], key: str, task: asyncio.Task[T]) -> None:
    under_way.pop(key, None)
    if not task.cancelled():
        task.exception()  # marked as seen: all who waited may have been cut off
