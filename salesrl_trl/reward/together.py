"""Batches neighbouring completions into one call: when it starts, whom it includes, and who gets which result."""

import asyncio
import contextlib
import contextvars
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Generic, TypeVar

from salesrl_trl.reward.batch import Sample
from salesrl_trl.reward.scorer import Per
from salesrl_trl.service.event_loop import now, remaining_s
from salesrl_trl.telemetry.completion_record import CompletionRecord, noted_in

A = TypeVar("A")
R = TypeVar("R")


class Together(Generic[A, R]):
    """Makes one `call` for each unit of completions, as defined by `per`. The call receives the items of all ready
    members, ordered by place, and returns one result each."""

    def __init__(self, per: Per, call: Callable[[Sequence[A]], Awaitable[Sequence[R]]]) -> None:
        self._per, self.call = per, call
        self._units: dict[tuple[int, int, int], _Neighbours[A, R]] = {}  # by batch, first place and round

    @contextlib.contextmanager
    def entered(self, sample: Sample) -> Iterator["Member[A, R]"]:
        """Inside the block, the rest of the unit waits until this completion is ready. Leaving the block earlier
        excludes it. Cancellation discards its unit; a restarted unit enters as the next round."""
        size = self._per.size(sample.group, sample.size)
        first = sample.place - sample.place % size
        key = (sample.batch, first, sample.round)
        unit = self._units.setdefault(key, _Neighbours(min(size, sample.size - first), self))
        unit.enter()
        member = Member(sample.place, unit)
        try:
            yield member
        except asyncio.CancelledError:
            self._units.pop(key, None)
            raise
        finally:
            if not member.is_ready and key in self._units:
                unit.settle()
            if unit.is_over:
                self._units.pop(key, None)


@dataclass(eq=False, slots=True)
class Member(Generic[A, R]):
    """A completion waiting for a shared call."""

    place: int
    unit: "_Neighbours[A, R]"
    is_ready: bool = False
    has_call: asyncio.Event = field(default_factory=asyncio.Event)
    call: "asyncio.Task[dict[int, R]] | None" = None
    others: "set[Member[A, R]]" = field(default_factory=set)  # all that wait for the call, including this one
    started: float = 0.0  # when the call began, on the `time.perf_counter` clock
    record: CompletionRecord = field(default_factory=CompletionRecord)  # records the call's requests

    async def result(self, item: A) -> R:
        """Its result from the call, which starts once the unit is complete and is cancelled once nobody waits."""
        self.is_ready = True
        self.unit.ready[self] = item
        self.unit.settle()
        try:
            await self.has_call.wait()
            assert self.call is not None
            return (await asyncio.shield(self.call))[self.place]
        finally:
            self.others.discard(self)
            if self.call is not None and not self.others:
                self.call.cancel()

    def note(self, record: CompletionRecord, path: str) -> None:
        """Add the call's requests to a completion's record, using this path for requests without one."""
        calls = [replace(call, path=call.path or path) for call in self.record.calls]
        record.add(CompletionRecord(calls=calls, queue_s=self.record.queue_s))


class _Neighbours(Generic[A, R]):
    """The completions of one unit. If some are late, the others wait at most half of the remaining time; late ones
    then get separate calls."""

    def __init__(self, size: int, together: Together[A, R]) -> None:
        self._size, self._together = size, together
        self._entered = self._known = 0  # how many entered, and how many are ready or excluded
        self.ready: dict[Member[A, R], A] = {}  # without a call
        self._context: contextvars.Context | None = None  # of the last one to enter: it has the most time left
        self._ends = math.inf  # when to stop waiting for late ones, on the event loop's clock

    @property
    def is_over(self) -> bool:
        return self._known == self._size

    def enter(self) -> None:
        self._entered += 1
        if self._entered == self._size:
            self._context = contextvars.copy_context()
            if math.isfinite(left_s := remaining_s()):
                self._ends = now() + left_s / 2
                asyncio.get_running_loop().call_at(self._ends, self._begin)

    def settle(self) -> None:
        """One more completion is ready or excluded."""
        self._known += 1
        if self.is_over or now() >= self._ends:
            self._begin()

    def _begin(self) -> None:
        asked, self.ready = self.ready, {}
        if not asked:
            return
        call = asyncio.get_running_loop().create_task(self._run(asked), context=self._context)
        others = {*asked}
        for member in others:
            member.call, member.others = call, others
            member.has_call.set()

    async def _run(self, asked: Mapping[Member[A, R], A]) -> dict[int, R]:
        started, record = time.perf_counter(), CompletionRecord()
        for member in asked:
            member.started, member.record = started, record
        members = sorted(asked, key=attrgetter("place"))
        with noted_in(record):
            results = await self._together.call([asked[member] for member in members])
        return {member.place: result for member, result in zip(members, results, strict=True)}
