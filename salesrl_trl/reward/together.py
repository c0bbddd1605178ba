"""One call for neighbours that are scored together: the completions of a prompt, or of a batch.

Owns when the call is made, for whom, and who gets which of its results. `functions` and `judge_reward` use it.
"""

import asyncio
import contextlib
import contextvars
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from salesrl_trl.recording.completion_record import CompletionRecord, noted_in
from salesrl_trl.reward.batch import Sample
from salesrl_trl.reward.scorer import Per
from salesrl_trl.reward.service.event_loop import remaining_s

A = TypeVar("A")
R = TypeVar("R")


@dataclass(eq=False, slots=True)
class Member(Generic[A, R]):
    """A completion on its way to a shared call."""

    place: int
    unit: "_Neighbours[A, R]"
    started: float = 0.0  # when the call began, on `time.perf_counter`'s scale
    record: CompletionRecord = field(default_factory=CompletionRecord)  # of the call's requests
    item: A | None = None  # what the call gets of it, once it is ready
    answer: "asyncio.Future[R] | None" = None

    async def result(self, item: A) -> R:
        """Its result of the call, which is made once nobody else can come. When nobody waits any more, the call is
        cancelled."""
        self.item, self.answer = item, asyncio.get_running_loop().create_future()
        self.unit.add(self)
        return await self.answer

    def note(self, record: CompletionRecord, path: str) -> None:
        """Add the call's requests to a completion's record, with this path where they have none."""
        calls = [replace(call, path=call.path or path) for call in self.record.calls]
        record.add(CompletionRecord(calls=calls, queue_s=self.record.queue_s))


class Together(Generic[A, R]):
    """Makes one `call` for the completions of each unit that `per` says. It gets what is known of those that are
    ready, in the order of their places, and returns a result for each."""

    def __init__(self, per: Per, call: Callable[[Sequence[A]], Awaitable[Sequence[R]]]) -> None:
        self._per = per
        self._call = call
        self._units: dict[tuple[int, int, int], _Neighbours[A, R]] = {}  # by batch, first place and round

    @contextlib.contextmanager
    def entered(self, sample: Sample) -> Iterator[Member[A, R]]:
        """Inside the block the others of its unit wait for this completion until it is ready. One that leaves the
        block without a result is left out. One that is cancelled is given up with its whole unit, or comes again in
        the next round."""
        size = self._per.size(sample.group, sample.size)
        first = sample.place - sample.place % size
        key = (sample.batch, first, sample.round)
        unit = self._units.get(key)
        if unit is None:
            unit = self._units[key] = _Neighbours(min(size, sample.size - first), self._call)
        unit.enter()
        member = Member(sample.place, unit)
        is_given_up = False
        try:
            yield member
        except asyncio.CancelledError:
            is_given_up = True
            raise
        finally:
            if member.answer is None and not is_given_up:
                unit.add(None)
            if is_given_up or unit.is_over:
                self._units.pop(key, None)


class _Neighbours(Generic[A, R]):
    """The completions of one unit. Where some are late, the others do not wait for them longer than half of the time:
    these then have calls of their own."""

    def __init__(self, size: int, call: Callable[[Sequence[A]], Awaitable[Sequence[R]]]) -> None:
        self._size = size
        self._call = call
        self._entered = self._known = 0  # how many began, and how many are ready or left out
        self._ready: list[Member[A, R]] = []  # without a call
        self._context: contextvars.Context | None = None  # of the last to begin: it has the most time
        self._waiting: asyncio.TimerHandle | None = None

    @property
    def is_over(self) -> bool:
        return self._known == self._size

    def enter(self) -> None:
        self._entered += 1
        if self._entered == self._size:
            self._context, left_s = contextvars.copy_context(), remaining_s()
            if math.isfinite(left_s):
                self._waiting = asyncio.get_running_loop().call_later(left_s / 2, self._begin)

    def add(self, member: Member[A, R] | None) -> None:
        """One is ready, or is left out."""
        self._known += 1
        if member is not None:
            self._ready.append(member)
        is_late = self._waiting is not None and self._waiting.when() <= asyncio.get_running_loop().time()
        if self.is_over and self._waiting is not None:
            self._waiting.cancel()
        if self.is_over or is_late:
            self._begin()

    def _begin(self) -> None:
        asked, self._ready = sorted(self._ready, key=lambda member: member.place), []
        if not asked:
            return
        calling = asyncio.get_running_loop().create_task(self._run(asked), context=self._context)
        answers = [member.answer for member in asked if member.answer is not None]
        for answer in answers:
            answer.add_done_callback(lambda _: calling.cancel() if all(one.done() for one in answers) else None)

    async def _run(self, asked: Sequence[Member[A, R]]) -> None:
        started, record = time.perf_counter(), CompletionRecord()
        for member in asked:
            member.started, member.record = started, record
        results: Sequence[R] = ()
        failed: BaseException | None = None
        try:
            with noted_in(record):
                results = await self._call([member.item for member in asked if member.item is not None])
        except Exception as error:  # each of them raises it
            failed = error
        for place, member in enumerate(asked):
            if member.answer is None or member.answer.done():
                continue
            if failed is not None:
                member.answer.set_exception(failed)
            else:
                member.answer.set_result(results[place])
