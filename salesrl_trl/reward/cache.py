"""Each question asked once: equal calls share one that is under way, and later ones its answer.

Owns the keys of answers, the sharing of calls, and the count of calls that were saved. A failure is never kept. The
module `answer_store` owns where answers lie.
"""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from salesrl_trl.errors import DeadlineExceeded, ServiceError
from salesrl_trl.reward.answer_store import AnswerStore
from salesrl_trl.reward.service.deadline import remaining_s
from salesrl_trl.reward.service.per_event_loop import PerLoop

T = TypeVar("T")

CLOSE_TIMEOUT_S = 1.0
"""Longest wait, at the end, for calls that were cancelled."""


def cache_key(*parts: object) -> str:
    """A hash of everything that decides an answer. `parts` must be JSON values."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class Memo(Generic[T]):
    """Asks once: equal calls share one that is under way, and later ones its answer.

    Args:
        store (`AnswerStore`):
            Where answers are kept.
        to_json (`Callable[[T], object]`):
            Makes a JSON value of an answer, for the store.
        from_json (`Callable[[object], T]`):
            Makes the answer of a value again. It raises `ValueError`, `TypeError` or `KeyError` for a value that
            another version wrote. The answer is then asked for again, and replaces that value.
    """

    def __init__(self, store: AnswerStore, to_json: Callable[[T], object], from_json: Callable[[object], T]) -> None:
        self._store = store
        self._to_json = to_json
        self._from_json = from_json
        self._under_way: PerLoop[dict[str, asyncio.Task[tuple[T, bool]]]] = PerLoop(dict)
        self._fetched: set[str] = set()  # ahead, and not used yet
        self.hits = 0
        """Answers that cost no call. The reader sets it back to 0."""

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
                Refuses an answer that is not to be kept, by `ValueError` or `ServiceError`. A new one is not put into
                the store. One that lies there is asked for again.
        """
        answer, saved = await self._obtain(key, ask, check)
        if saved:
            self._count(key)
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
                # that call had less time than this one
        task = under_way[key] = asyncio.ensure_future(self._ask(key, ask, check))
        task.add_done_callback(lambda done: _forget(under_way, key, done))
        # Shielded, here and above: others wait for the same task, and one that is cut off must not cancel it.
        return await asyncio.shield(task)

    def _count(self, key: str) -> None:
        """Count an answer that cost no call, except the first use of one that was fetched ahead."""
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
