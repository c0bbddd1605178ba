"""Calls in flight on one event loop: their slots, and hedges: late calls that are sent a second time.

Owns the tasks, the timer task that starts hedges, and the pure laws: how many slots there are, and when a call is
late. `transport` calls it.
"""

import asyncio
import contextvars
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import anyio

from salesrl_trl.errors import ServiceOverloaded, ServiceTimeout
from salesrl_trl.recording.completion_record import BEATEN
from salesrl_trl.reward.service.breaker import Breaker
from salesrl_trl.reward.service.budget import ServiceQuota
from salesrl_trl.reward.service.event_loop import now

T = TypeVar("T")
Attempt: TypeAlias = Callable[[], Coroutine[Any, Any, T]]  # one request with its whole answer

LOOK_EVERY_S = 0.02
MAX_HEDGES = 2
"""Most extra requests for one call. If 2 % straggle, 1 call of 2,500 meets two stragglers, and its batch waits."""
PERCENTILE = 0.95  # a call is late when 95 % of the recent calls were faster
MARGIN = 1.3
"""Factor on the percentile. With it few calls that are merely slow are sent twice; the budget is for stragglers."""
WINDOW = 256  # the percentile is taken over this many latest calls
MIN_SAMPLES = 20  # with fewer calls there is no percentile
REFRESH_EVERY = 16  # calls between two computations of the percentile
GROWTH_PER_SUCCESS = 0.5
"""Slots that each answer adds during the slow start. Doubling could overshoot a service's limit by its whole size."""
DECREASE = 0.8
"""Factor after an overload. A service that takes 16 calls is tried with 17 again after about three rounds."""
ROUNDS_TO_GROW = 3
"""Rounds of waiting calls before one more slot is tried. With fewer, the call that is turned away would come last."""


class AdaptiveLimit:
    """The limit of calls in flight to one service, from `start` up to `cap`.

    While calls wait for a slot, an answer raises the limit L:

        L <- L + 1/2    until the first overload (slow start)
        L <- L + 1/L    after it (one more slot for a round of answers), where ROUNDS_TO_GROW x L calls wait or more

    and an overload lowers it, once for all calls that were in flight together:

        L <- max(1, 0.8 L)
    """

    def __init__(self, start: int, cap: int) -> None:
        self.cap = cap
        self._limit = float(min(start, cap))
        self._slow_start = True
        self._sent = 0
        self._sent_at_decrease = -1

    @property
    def slots(self) -> int:
        """The limit in whole calls, at least 1."""
        return int(self._limit)

    def record_sent(self) -> int:
        """A call is about to be sent. Returns its number, which `record_overload` takes."""
        self._sent += 1
        return self._sent

    def record_answer(self, *, waiting: int) -> None:
        """A call was answered while `waiting` calls waited for a slot. Without any, the limit need not grow."""
        if waiting > 0 and (self._slow_start or waiting >= ROUNDS_TO_GROW * self._limit):
            self._limit = min(self._limit + (GROWTH_PER_SUCCESS if self._slow_start else 1 / self._limit), self.cap)

    def record_overload(self, number: int) -> None:
        """The service turned the call `number` away. One that was sent before the last decrease says nothing new."""
        if number <= self._sent_at_decrease:
            return
        self._sent_at_decrease = self._sent
        self._slow_start = False
        self._limit = max(1.0, DECREASE * self._limit)


class HedgePolicy:
    """Says after how many seconds a call is late, and whether another extra call may be made.

        late after = MARGIN x 95th percentile of the latest WINDOW latencies
        extra calls <= fraction x calls sent

    A `fraction` of 0 allows none.
    """

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._latencies: deque[float] = deque(maxlen=WINDOW)
        self._since_refresh = 0
        self.sent = self.hedges = 0  # calls, and extra ones among them; counted by the caller
        self.late_after_s: float | None = None  # seconds after which a call is late; `None` until enough is known

    @property
    def enabled(self) -> bool:
        return self._fraction > 0

    @property
    def affordable(self) -> bool:
        """Whether one more extra call stays within the budget."""
        return self.hedges + 1 <= self._fraction * self.sent

    def record_answer(self, seconds: float) -> None:
        """A call was answered after `seconds`, without the time in the queue."""
        self._latencies.append(seconds)
        self._since_refresh += 1
        if len(self._latencies) >= MIN_SAMPLES and (self.late_after_s is None or self._since_refresh >= REFRESH_EVERY):
            self._since_refresh = 0
            ranked = sorted(self._latencies)
            self.late_after_s = MARGIN * ranked[int(PERCENTILE * (len(ranked) - 1))]


@dataclass(eq=False)
class Flights:
    """Slots and hedges. Calls and hedges together stay within the limit.

    A call may have several requests. A failure of one while another goes on is recorded here, in `limit` and
    `traffic`, because `transport` does not see it. There are no hedges while the `breaker` is open, and none is sent
    that would have to wait for the `quota`.
    """

    limit: AdaptiveLimit
    hedging: HedgePolicy
    breaker: Breaker
    traffic: Counter[str]
    quota: ServiceQuota | None = None

    def __post_init__(self) -> None:
        self._slots = anyio.CapacityLimiter(self.limit.slots)
        self._flying: dict[_Flight[Any], None] = {}  # in the order they were sent
        self.waiting = 0
        self._hedges = 0
        self._hedge_waits = False
        self._hedge_timer: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one slot, waiting for it in line."""
        borrower = object()
        self.waiting += 1
        try:
            await self._slots.acquire_on_behalf_of(borrower)
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self._slots.release_on_behalf_of(borrower)

    def resize(self) -> None:
        """Give the queue the slots that the hedges leave. A hedge that waits gets the next free slot."""
        slots = max(self.limit.slots - self._hedges - self._hedge_waits, 0)
        if slots != self._slots.total_tokens:
            self._slots.total_tokens = slots

    async def send(self, attempt: Attempt[T], number: int) -> T:
        """Run `attempt`. If it is late, send further requests, up to `MAX_HEDGES`; the earliest success is the result.
        `number` is the request's number in `limit`."""
        self.hedging.sent += 1
        flight = _Flight(attempt, number, self._failed_beside)
        self._flying[flight] = None
        if self.hedging.enabled and (self._hedge_timer is None or self._hedge_timer.done()):
            self._hedge_timer = asyncio.create_task(self._run_hedge_timer())
        try:
            result = await flight.result
        finally:
            del self._flying[flight]
            flight.cancel()
            if flight.hedges:
                self._hedges -= flight.hedges
                self.resize()
        self.hedging.record_answer(now() - flight.started)
        self.traffic["hedges_won"] += flight.won_by_hedge
        return result

    async def _run_hedge_timer(self) -> None:
        """Start the hedges that are due, while a call is in flight."""
        while self._flying:
            await asyncio.sleep(LOOK_EVERY_S)
            self._hedge_waits = self._start_hedges()
            self.resize()
        self._hedge_waits = False
        self.resize()

    def _start_hedges(self) -> bool:
        """Send late calls again, the oldest first. Returns whether a hedge waits for a slot."""
        if self.hedging.late_after_s is None:
            return False
        late_since = now() - self.hedging.late_after_s
        for flight in self._flying:
            if flight.started > late_since or not self.hedging.affordable or self.breaker.is_open:
                break
            if flight.last_sent > late_since or flight.hedges == MAX_HEDGES:
                continue
            if self._slots.borrowed_tokens + self._hedges >= self.limit.slots:
                return self.limit.slots > 1
            if self.quota is not None and not self.quota.admits_now():
                return False
            flight.send(self.limit.record_sent())
            self._hedges += 1
            self.hedging.hedges += 1
            self.traffic.update(sent=1, hedges=1)
        return False

    def _failed_beside(self, error: BaseException, number: int) -> None:
        """Record a request that failed while another one for the same call goes on and may succeed."""
        if isinstance(error, ServiceOverloaded):
            self.traffic["overloads"] += 1
            self.limit.record_overload(number)
            self.resize()
        else:
            self.traffic["timeouts" if isinstance(error, ServiceTimeout) else "failures"] += 1


class _Flight(Generic[T]):
    """One attempt in flight, with its extra requests if there are any."""

    def __init__(self, attempt: Attempt[T], number: int, failed_beside: Callable[[BaseException, int], None]) -> None:
        self.started = self.last_sent = now()
        self.won_by_hedge = False
        self.result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._attempt = attempt
        self._failed_beside = failed_beside
        self._context = contextvars.copy_context()  # hedges are sent by another call's task
        self._tasks: list[asyncio.Task[T]] = []
        self._out = 0  # requests that have not ended
        self.send(number)

    @property
    def hedges(self) -> int:
        """Extra requests so far."""
        return len(self._tasks) - 1

    def send(self, number: int) -> None:
        """Send the request, or send it once more, under this number."""
        self.last_sent = now()
        task = asyncio.get_running_loop().create_task(self._attempt(), context=self._context.copy())
        self._tasks.append(task)
        self._out += 1
        task.add_done_callback(partial(self._on_done, number))

    def cancel(self) -> None:
        is_answered = self.result.done() and not self.result.cancelled() and self.result.exception() is None
        for task in self._tasks:
            task.cancel(BEATEN if is_answered else None)
        if self.result.done() and not self.result.cancelled():
            self.result.exception()  # marked as retrieved: the caller may have been cancelled at the same moment

    def _on_done(self, number: int, task: asyncio.Task[T]) -> None:
        """The first success is the result. A failure is the result only when no other request goes on."""
        self._out -= 1
        if task.cancelled():
            return
        error = task.exception()
        if self.result.done():
            return
        if error is None:
            self.won_by_hedge = task is not self._tasks[0]
            self.result.set_result(task.result())
        elif not self._out:  # another request may have ended with an answer that is looked at next
            self.result.set_exception(error)
        else:
            self._failed_beside(error, number)
