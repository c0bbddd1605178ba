"""Calls in flight on one event loop: their slots, and the extra requests for those that are late.

Owns the tasks and the look-out that starts hedges. When a call is late and how many slots there are is decided by the
pure laws it is given.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Generic, TypeVar

import anyio

from salesrl_trl.errors import ServiceOverloaded, ServiceTimeout
from salesrl_trl.reward.service.breaker import Breaker
from salesrl_trl.reward.service.deadline import now
from salesrl_trl.reward.service.hedging import HedgePolicy
from salesrl_trl.reward.service.limits import AdaptiveLimit

T = TypeVar("T")

LOOK_EVERY_S = 0.02
"""Time between two looks for late calls."""
MAX_HEDGES = 2
"""Extra requests for one call. Where 2 % straggle, 1 call of 2,500 meets two, and its batch waits for it."""


class Flights:
    """Slots and hedges. Calls and hedges together stay within the limit.

    Args:
        limit (`AdaptiveLimit`):
            How many slots there are; `resize` follows it. Told of requests that are turned away while another one for
            the same call goes on; of all others its owner tells it.
        hedging (`HedgePolicy`):
            When a call is late.
        breaker (`Breaker`):
            No hedges while it is open.
        traffic (`Counter[str]`):
            Counts `sent` hedges, `hedges`, `hedges_won`, and of the requests that fail while another one for the same
            call goes on `overloads`, `timeouts` and `failures`.
    """

    def __init__(self, limit: AdaptiveLimit, hedging: HedgePolicy, breaker: Breaker, traffic: Counter[str]) -> None:
        self._limit = limit
        self._hedging = hedging
        self._breaker = breaker
        self._traffic = traffic
        self._slots = anyio.CapacityLimiter(limit.slots)
        self._flying: dict[_Flight[Any], None] = {}  # in the order they were sent
        self._waiting = 0
        self._hedges = 0
        self._hedge_waits = False
        self._lookout: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Calls that wait for a slot."""
        return self._waiting

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one slot, waiting for it in line."""
        borrower = object()
        self._waiting += 1
        try:
            await self._slots.acquire_on_behalf_of(borrower)
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._slots.release_on_behalf_of(borrower)

    def resize(self) -> None:
        """Give the queue what the limit leaves beside the hedges. A hedge that waits has the next free slot."""
        slots = max(self._limit.slots - self._hedges - self._hedge_waits, 0)
        if slots != self._slots.total_tokens:
            self._slots.total_tokens = slots

    async def send(self, attempt: Callable[[], Awaitable[T]], number: int) -> T:
        """Run `attempt`, and again beside it when it is late; the first success counts.

        One look-out serves all calls, so that a call costs no timer of its own.

        Args:
            attempt (`Callable[[], Awaitable]`):
                Sends one request.
            number (`int`):
                What `limit` counted it as.
        """
        self._hedging.sent()
        flight = _Flight(attempt, number, self._failed_beside)
        self._flying[flight] = None
        if self._hedging.enabled and (self._lookout is None or self._lookout.done()):
            self._lookout = asyncio.create_task(self._look_out())
        try:
            result = await flight.landed
        finally:
            del self._flying[flight]
            flight.give_up()
            if flight.hedges:
                self._hedges -= flight.hedges
                self.resize()
        self._hedging.answered(now() - flight.started)
        self._traffic["hedges_won"] += flight.won_by_hedge
        return result

    async def _look_out(self) -> None:
        """Start the hedges that are due, as long as there is a call in flight."""
        while self._flying:
            await asyncio.sleep(LOOK_EVERY_S)
            self._hedge_waits = self._start_hedges()
            self.resize()
        self._hedge_waits = False
        self.resize()

    def _start_hedges(self) -> bool:
        """Ask late calls a second time, the oldest first; returns whether one waits for a slot."""
        if self._hedging.late_after_s is None:
            return False
        late_since = now() - self._hedging.late_after_s
        for flight in self._flying:
            if flight.started > late_since or not self._hedging.affordable or self._breaker.is_open:
                break
            if flight.last_sent > late_since or flight.hedges == MAX_HEDGES:
                continue
            if self._slots.borrowed_tokens + self._hedges >= self._limit.slots:
                return self._limit.slots > 1
            flight.send(self._limit.sent())
            self._hedges += 1
            self._hedging.hedged()
            self._traffic.update(sent=1, hedges=1)
        return False

    def _failed_beside(self, error: BaseException, number: int) -> None:
        """A request failed, but another one for the same call goes on, and may succeed: nobody else hears of it."""
        if isinstance(error, ServiceOverloaded):
            self._traffic["overloads"] += 1
            self._limit.overloaded(number)
            self.resize()
        else:
            self._traffic["timeouts" if isinstance(error, ServiceTimeout) else "failures"] += 1


class _Flight(Generic[T]):
    """One attempt in flight, and the extra requests for it where there are any."""

    def __init__(
        self, attempt: Callable[[], Awaitable[T]], number: int, failed_beside: Callable[[BaseException, int], None]
    ) -> None:
        self.started = self.last_sent = now()
        self.won_by_hedge = False
        self.landed: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._attempt = attempt
        self._failed_beside = failed_beside
        self._tasks: list[asyncio.Task[T]] = []
        self._out = 0  # requests whose end was not seen yet
        self.send(number)

    @property
    def hedges(self) -> int:
        """Extra requests so far."""
        return len(self._tasks) - 1

    def send(self, number: int) -> None:
        """Ask, or ask once more, by this number."""
        self.last_sent = now()
        task = asyncio.ensure_future(_awaited(self._attempt))
        self._tasks.append(task)
        self._out += 1
        task.add_done_callback(partial(self._land, number))

    def give_up(self) -> None:
        """Cancel what is still running."""
        for task in self._tasks:
            task.cancel()
        if self.landed.done() and not self.landed.cancelled():
            self.landed.exception()  # seen, also where the caller was cancelled at the same moment

    def _land(self, number: int, task: asyncio.Task[T]) -> None:
        """The first success decides; a failure only when nothing is left."""
        self._out -= 1
        if task.cancelled():
            return
        error = task.exception()
        if self.landed.done():
            return
        if error is None:
            self.won_by_hedge = task is not self._tasks[0]
            self.landed.set_result(task.result())
        elif not self._out:  # one that is done, too, may have an answer that comes next
            self.landed.set_exception(error)
        else:
            self._failed_beside(error, number)


async def _awaited(attempt: Callable[[], Awaitable[T]]) -> T:
    return await attempt()
