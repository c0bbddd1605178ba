"""What services answered, kept so that nobody asks twice.

Owns the file (SQLite, values as JSON, nothing that is executed when read), its keys and the sharing of equal calls
that are under way at the same time. A failure is never kept. A cache that can't be read or written is no reason for a
call to fail, nor to wait: it is then as if it were empty, which is said once.

The file is read and written in a thread of its own: no disk and no other process's lock holds the event loop.

The file holds answers in plain text, customers' words included, so it is readable by its owner alone. Its keys are
hashes. No credential is part of either.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from salesrl_trl.errors import DeadlineExceeded, ServiceError
from salesrl_trl.reward.service.deadline import remaining_s
from salesrl_trl.reward.service.per_event_loop import PerLoop

T = TypeVar("T")

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 0.1
"""Patience with another process that writes to the file: a commit takes milliseconds."""
LOCK_PAUSE_S = 1.0
"""For so long a locked file counts as empty, without another look at it."""
LOOK_UP_TIMEOUT_S = 1.0
"""Patience with a disk that does not answer."""
KEPT_IN_MEMORY = 20_000
"""Answers that are kept where there is no file, the latest ones: some 60 MB, and many batches."""
CLOSE_TIMEOUT_S = 1.0
"""Patience with calls that were cancelled at the end."""
LAST_WRITE_TIMEOUT_S = 5.0
"""Patience with a locked file, or a slow disk, at the end."""

_SCHEMA = "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def cache_key(*parts: Any) -> str:
    """A hash of everything that decides an answer. `parts` must be JSON values."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class AnswerStore:
    """JSON values by key, in a file or, without one, in memory.

    `get` belongs to an event loop; the other methods may be called from any thread.

    Args:
        path (`Path`, *optional*):
            The file; made when it is missing, its folder too. In memory when not given.
        keep (`int`, *optional*, defaults to `KEPT_IN_MEMORY`):
            Most values in memory, the latest ones; those that wait to be written count. 0 for none.
    """

    def __init__(self, path: Path | None = None, *, keep: int = KEPT_IN_MEMORY) -> None:
        self._keep = keep
        self._file = None if path is None else _File(path)
        self._memory: dict[str, Any] = {}  # what is not in the file yet; without a file, everything
        self._guard = threading.Lock()  # of `_memory`, for moments
        self._thread: ThreadPoolExecutor | None = None
        self._look_ups: PerLoop[_LookUps] = PerLoop(partial(_LookUps, self._look_up))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(AnswerStore, keep=self._keep), (None if self._file is None else self._file.path,)

    @property
    def path(self) -> Path | None:
        """The file."""
        return None if self._file is None else self._file.path

    async def use(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """What `work` makes of the file, on its thread; `None` without one, or where it is locked or broken."""
        return None if self._file is None else await asyncio.wrap_future(self._submit(self._file.use, work))

    def at_hand(self, key: str) -> Any:
        """The value where it is in memory, or `None`."""
        return self._memory.get(key)

    async def get(self, key: str) -> Any:
        """The value, or `None`. Takes at most `LOOK_UP_TIMEOUT_S`."""
        at_hand = self.at_hand(key)
        if at_hand is not None or self._file is None:
            return at_hand
        return await self._look_ups.get().get(key)

    def put(self, key: str, value: Any) -> None:
        """Keep a value. It is in the file some time after the next `flush`."""
        with self._guard:
            self._memory.pop(key, None)
            self._memory[key] = value
            while len(self._memory) > self._keep:
                del self._memory[next(iter(self._memory))]

    def flush(self) -> None:
        """Begin to write what is new."""
        if self._memory and self._file is not None:
            self._submit(self._write)

    def close(self) -> None:
        """Write what is new and close the file. The next use opens it again."""
        if self._file is None or (self._thread is None and not self._memory):
            return
        ended = self._submit(self._write_and_close)
        with contextlib.suppress(TimeoutError):
            ended.result(LAST_WRITE_TIMEOUT_S)
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=False)

    def _submit(self, work: Callable[..., T], *given: Any) -> "Future[T]":
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cache")
        return self._thread.submit(work, *given)

    # On the file's thread

    def _look_up(self, keys: list[str]) -> "Future[dict[str, Any]]":
        assert self._file is not None
        return self._submit(self._file.read, keys)

    def _write(self) -> bool:
        assert self._file is not None
        with self._guard:
            new = list(self._memory.items())
        if not self._file.write([(key, json.dumps(value)) for key, value in new]):
            return False
        with self._guard:
            for key, value in new:
                if self._memory.get(key) is value:
                    del self._memory[key]
        return True

    def _write_and_close(self) -> None:
        assert self._file is not None
        end = time.monotonic() + LAST_WRITE_TIMEOUT_S / 2
        while not self._write() and self._file.may_be_written and time.monotonic() < end:
            pass  # it is locked, which was waited for
        self._file.close()


class _LookUps:
    """Those of one event loop. The ones that come while some are out go together."""

    def __init__(self, look_up: Callable[[list[str]], "Future[dict[str, Any]]"]) -> None:
        self._look_up = look_up
        self._wanted: dict[str, asyncio.Future[Any]] = {}
        self._working: asyncio.Task[None] | None = None
        self._stuck = False

    async def get(self, key: str) -> Any:
        if self._stuck:
            return None
        if key not in self._wanted:
            self._wanted[key] = asyncio.get_running_loop().create_future()
        if self._working is None:
            self._working = asyncio.ensure_future(self._work())
        found = self._wanted[key]
        try:
            async with asyncio.timeout(min(LOOK_UP_TIMEOUT_S, remaining_s())):
                return await asyncio.shield(found)
        except TimeoutError:
            self._stuck = remaining_s() > 0 and self._working is not None
            return None

    async def _work(self) -> None:
        try:
            while self._wanted:
                await asyncio.sleep(0)  # those that come at this moment come along
                wanted, self._wanted = self._wanted, {}
                found: dict[str, Any] = {}
                try:
                    found = await asyncio.wrap_future(self._look_up(list(wanted)))
                finally:
                    for key, waiting in wanted.items():
                        if not waiting.done():
                            waiting.set_result(found.get(key))
        finally:
            self._working = None
            self._stuck = False


class _File:
    """The file, on its own thread. Says once why it is of no use, where it is of none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.may_be_written = True
        self._may_be_read = True
        self._locked_until = 0.0
        self._said_locked = False
        self._open: sqlite3.Connection | None = None

    def read(self, keys: Iterable[str]) -> dict[str, Any]:
        """What is there of these, as JSON values."""
        found: dict[str, Any] = {}
        if not self._may_be_read or time.monotonic() < self._locked_until:
            return found
        try:
            file = self._opened()
            for key in keys:
                row = file.execute("SELECT value FROM answers WHERE key = ?", (key,)).fetchone()
                with contextlib.suppress(ValueError, TypeError, RecursionError):  # no JSON: as if it were not there
                    found |= {} if row is None else {key: json.loads(row[0])}
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
                file.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", new)
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
        try:
            return work(self._opened())
        except (sqlite3.Error, OSError) as error:
            self._is_locked(error)
            return None

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _opened(self) -> sqlite3.Connection:
        if self._open is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            file = sqlite3.connect(self.path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
            try:
                file.execute(_SCHEMA)
            except sqlite3.Error:
                file.close()
                raise
            self._open = file
        return self._open

    def _is_locked(self, error: Exception) -> bool:
        """By another process, for the moment."""
        if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _LOCKED:  # the lowest byte says what, the others why
            return False
        self._locked_until = time.monotonic() + LOCK_PAUSE_S
        if not self._said_locked:
            self._said_locked = True
            logger.warning(f"the cache {self.path} is locked by another process: it counts as empty while it is")
        return True


class Memo:
    """Asks once: equal calls share one that is under way, and later ones its answer.

    Args:
        store (`AnswerStore`):
            Where answers are kept.
        to_json (`Callable[[T], Any]`), from_json (`Callable[[Any], T]`):
            The way of an answer into the store and back. `from_json` may raise `ValueError`, `TypeError` or `KeyError`
            for what another version or somebody else wrote; it is then asked for again, and overwritten.
    """

    def __init__(self, store: AnswerStore, to_json: Callable[[Any], Any], from_json: Callable[[Any], Any]) -> None:
        self._store = store
        self._to_json = to_json
        self._from_json = from_json
        self._under_way: PerLoop[dict[str, asyncio.Task[Any]]] = PerLoop(dict)
        self._fetched: set[str] = set()  # ahead, and not used yet
        self.hits = 0
        """Answers that cost no call, since whoever reads it last set it to 0."""

    async def get(
        self, key: str, ask: Callable[[], Awaitable[T]], check: Callable[[T], object] = lambda answer: None
    ) -> T:
        """The answer for `key`: kept, under way, or asked for now. Raises what `ask` raises.

        Args:
            key (`str`):
                From `cache_key`.
            ask (`Callable[[], Awaitable[T]]`):
                Asks the service, and refuses what is no answer.
            check (`Callable[[T], object]`, *optional*):
                Refuses what is not to be kept, by `ValueError` or `ServiceError`: an answer that came is not put into
                the store, one that lies there is asked for again.
        """
        answer, saved = await self._obtain(key, ask, check)
        if saved:
            self._count(key)
        return answer

    async def fetch(
        self, key: str, ask: Callable[[], Awaitable[T]], check: Callable[[T], object] = lambda answer: None
    ) -> None:
        """Have the answer for `key` ready, or under way, for those who will want it. Raises what `ask` raises."""

        async def ahead() -> T:
            self._fetched.add(key)
            try:
                return await ask()
            except BaseException:  # no call was made for anybody
                self._fetched.discard(key)
                raise

        if key not in self._under_way.get():
            await self._obtain(key, ahead, check)

    async def _obtain(self, key: str, ask: Callable[[], Awaitable[T]], check: Callable[[T], object]) -> tuple[T, bool]:
        """The answer, and whether it cost no call."""
        kept = self._read(self._store.at_hand(key), check)
        if kept is not None:
            return kept, True
        under_way = self._under_way.get()
        while (task := under_way.get(key)) is not None:
            try:
                return (await asyncio.shield(task))[0], True
            except ServiceError as error:
                of_the_deadline = isinstance(error, DeadlineExceeded) or error.out_of_time
                if not of_the_deadline or remaining_s() <= 0:
                    raise
                # it was under way for somebody with less time
        task = under_way[key] = asyncio.ensure_future(self._ask(key, ask, check))
        task.add_done_callback(lambda done: _forget(under_way, key, done))
        # Shielded, here and above: others wait for the same task, and one that is cut off must not cancel it.
        return await asyncio.shield(task)

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

    async def _ask(self, key: str, ask: Callable[[], Awaitable[T]], check: Callable[[T], object]) -> tuple[T, bool]:
        kept = self._read(await self._store.get(key), check)
        if kept is not None:
            return kept, True
        answer = await ask()
        value = self._to_json(answer)
        if self._read(value, check) is not None:
            self._store.put(key, value)
        return answer, False

    def _read(self, value: Any, check: Callable[[T], object]) -> T | None:
        try:
            answer: T | None = None if value is None else self._from_json(value)
            if answer is not None:
                check(answer)
            return answer
        except (ValueError, TypeError, KeyError, ServiceError):
            return None


def _forget(under_way: dict[str, asyncio.Task[Any]], key: str, task: asyncio.Task[Any]) -> None:
    under_way.pop(key, None)
    if not task.cancelled():
        task.exception()  # seen, also where everybody who waited has been cut off
