"""Values that services answered, in memory or in a file, by key.

Owns which values are kept, the look-ups of one event loop, and the thread on which the file is read and written. So
no disk, and no lock of another process, holds up the event loop. The file itself belongs to `answer_file`, keys and
the sharing of calls to `cache`.
"""

import asyncio
import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from salesrl_trl.reward.answer_file import AnswerFile
from salesrl_trl.reward.service.deadline import remaining_s
from salesrl_trl.reward.service.per_event_loop import PerLoop

T = TypeVar("T")

LOOK_UP_TIMEOUT_S = 1.0
"""Longest wait for a disk that does not answer."""
KEPT_IN_MEMORY = 20_000
"""Answers that are kept without a file, the latest ones: about 60 MB, and many batches."""
WRITE_AFTER_S = 0.1
"""Seconds from a new value to its way into the file. Values that come meanwhile go along."""
LAST_WRITE_TIMEOUT_S = 5.0
"""Longest wait for a locked file, or a slow disk, at the end."""


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
        self._file = None if path is None else AnswerFile(path)
        self._memory: dict[str, object] = {}  # what is not in the file yet; without a file, everything
        self._guard = threading.Lock()  # of `_memory`, for moments
        self._thread: ThreadPoolExecutor | None = None
        self._timer: threading.Timer | None = None  # of the next write
        self._look_ups: PerLoop[_LookUps] = PerLoop(partial(_LookUps, self._look_up))

    def __reduce__(self) -> tuple[object, ...]:
        return partial(AnswerStore, keep=self._keep), (None if self._file is None else self._file.path,)

    @property
    def path(self) -> Path | None:
        """The file."""
        return None if self._file is None else self._file.path

    async def use(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Run `work` on the file, on its thread. Returns `None` without a file, or if it is locked or broken."""
        return None if self._file is None else await asyncio.wrap_future(self._submit(self._file.use, work))

    def at_hand(self, key: str) -> object:
        """The value in memory, or `None`."""
        return self._memory.get(key)

    async def get(self, key: str) -> object:
        """The value, or `None`. Takes at most `LOOK_UP_TIMEOUT_S`."""
        at_hand = self.at_hand(key)
        if at_hand is not None or self._file is None:
            return at_hand
        return await self._look_ups.get().get(key)

    def put(self, key: str, value: object) -> None:
        """Keep a value. It is in the file within a second: a call is paid for, and a run may be killed at any time."""
        with self._guard:
            self._memory.pop(key, None)
            self._memory[key] = value
            while len(self._memory) > self._keep:
                del self._memory[next(iter(self._memory))]
            if self._file is not None and self._timer is None:
                self._write_soon()

    def close(self) -> None:
        """Write what is new and close the file. The next use opens it again."""
        if self._file is None or (self._thread is None and not self._memory):
            return
        with self._guard:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        ended = self._submit(self._write_and_close)
        with contextlib.suppress(TimeoutError):
            ended.result(LAST_WRITE_TIMEOUT_S)
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=False)

    def _write_soon(self) -> None:
        """Write after a moment, all that has come until then. Called with the guard held."""
        self._timer = threading.Timer(WRITE_AFTER_S, self._submit, (self._write_in_time,))
        self._timer.daemon = True
        self._timer.start()

    def _submit(self, work: Callable[..., T], *given: object) -> "Future[T]":
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cache")
        return self._thread.submit(work, *given)

    # On the file's thread

    def _look_up(self, keys: list[str]) -> "Future[dict[str, object]]":
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

    def _write_in_time(self) -> None:
        assert self._file is not None
        with self._guard:
            self._timer = None
        if not self._write() and self._file.may_be_written:
            with self._guard:
                if self._timer is None:
                    self._write_soon()

    def _write_and_close(self) -> None:
        assert self._file is not None
        end = time.monotonic() + LAST_WRITE_TIMEOUT_S / 2
        while not self._write() and self._file.may_be_written and time.monotonic() < end:
            pass  # it is locked, and the attempt has waited for it
        self._file.close()


class _LookUps:
    """The look-ups of one event loop. Those that come during a look-up share the next one."""

    def __init__(self, look_up: Callable[[list[str]], "Future[dict[str, object]]"]) -> None:
        self._look_up = look_up
        self._wanted: dict[str, asyncio.Future[object]] = {}
        self._working: asyncio.Task[None] | None = None
        self._stuck = False

    async def get(self, key: str) -> object:
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
                await asyncio.sleep(0)  # the look-ups of this moment share one
                wanted, self._wanted = self._wanted, {}
                found: dict[str, object] = {}
                try:
                    found = await asyncio.wrap_future(self._look_up(list(wanted)))
                finally:
                    for key, waiting in wanted.items():
                        if not waiting.done():
                            waiting.set_result(found.get(key))
        finally:
            self._working = None
            self._stuck = False
