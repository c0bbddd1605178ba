"""Calls in flight on one event loop: concurrency limits, hedges (duplicates of late calls), and the controllers that
set the limit and decide when a call is late."""

import asyncio
import contextlib
import contextvars
import logging
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar
from weakref import WeakSet

from salesrl_trl.errors import ServiceOverloaded, ServiceTimeout
from salesrl_trl.service.breaker import Breaker, Quota
from salesrl_trl.service.event_loop import now
from salesrl_trl.telemetry.completion_record import BEATEN

T = TypeVar("T")
Attempt: TypeAlias = Callable[[], Coroutine[object, object, T]]  # one request with its whole answer

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.02
MAX_HEDGES = 2  # most extra requests per call. If 2 % straggle, 1 call in 2,500 meets two stragglers.
PERCENTILE = 0.95  # a call is late when 95 % of recent calls were faster
MARGIN = 1.3  # factor on the percentile, so that few merely slow calls are duplicated
WINDOW = 256  # latest calls that the percentile covers
MIN_SAMPLES = 20  # calls needed for a percentile
REFRESH_EVERY = 16  # calls between updates of the percentile
GROWTH_PER_SUCCESS = 0.5  # increase of the limit per answer during fast growth
DECREASE = 0.8  # factor of a decrease. A service that accepts 16 calls is probed with 17 after about three rounds.
ROUNDS_TO_GROW = 3  # rounds of waiting calls before the limit grows by one: otherwise a refused call would finish last
MEMORY = 256  # exponentially weighted window of requests over which refusals and load are correlated
SIGNIFICANT = 2.5
"""Standard errors above 0 at which a correlation counts. At 2, random refusals occasionally lower the limit; at 3, a
service that accepts 8 calls refuses 3 % more before the limit follows."""
MEMORY_OF_SHARE = 24
MOST = 0.5
"""Share of refusals among the latest `MEMORY_OF_SHARE` requests from which a service counts as closed. Fewer requests
then cost nothing. Random refusals of 20 % never reach it, those of 30 % rarely."""
ROUNDING = 1e-9  # a smaller variance, relative to the mean square, counts as a constant load
OURS = "its 429s come with our load"
CLOSED = "it turns most requests away, at any load"


FALLEN: "WeakSet[AdaptiveLimit]" = WeakSet()
"""The limits of this process that were lowered and have not recovered, for heartbeats."""


def fallen() -> "list[AdaptiveLimit]":
    """The lowered limits. Safe from any thread while loops change them."""
    with contextlib.suppress(RuntimeError):
        return [*FALLEN]
    return []


class Sent(NamedTuple):
    number: int
    load: int  # requests in flight, including this one


class AdaptiveLimit:
    """The concurrency limit for one service, from `start` up to `cap`.

    While calls are queued, each answer raises the limit L:

        L <- L + 1/2    up to a level F, initially the cap (slow start)
        L <- L + 1/L    beyond F (+1 per round of answers), if at least ROUNDS_TO_GROW x L calls are queued

    A refusal ("later", a 429) lowers it, once for all concurrent calls, in two cases only:

        L <- max(1, 0.8 L), F <- 0         if refusals correlate with load: corr(refused, load) x sqrt(n) > SIGNIFICANT
        L <- max(1, 0.8 L), F <- L before  if most requests are refused, whatever the load

    `load` is the number of requests in flight when a request is sent. A service that accepts 8 concurrent requests
    refuses every ninth but never an eighth. A quota exhausted by others refuses the same share at any load, so fewer
    calls would not help. Requests count when sent, not when they end, because a refusal is faster than an answer.
    """

    def __init__(self, start: int, cap: int, service: str = "the service") -> None:
        self.cap, self._service = cap, service
        self.cause = ""  # of the latest decrease: `OURS` or `CLOSED`; empty before it and after recovery
        self.share = 0.0  # of refusals among the latest requests
        self._limit = float(min(start, cap))
        self._fast_until = float(cap)
        self._sent = 0
        self._sent_at_decrease = -1
        # weighted sums over requests: 1, load, load^2, refused, load x refused
        self._n = self._x = self._xx = self._r = self._xr = 0.0

    @property
    def slots(self) -> int:
        """The limit as a whole number, at least 1."""
        return int(self._limit)

    def in_words(self) -> str:
        """`judge is limited to 12 of 64 concurrent calls, because its 429s come with our load`."""
        return f"{self._service} is limited to {self.slots} of {self.cap} concurrent calls, because {self.cause}"

    def record_sent(self, load: int) -> Sent:
        """A request is about to be sent; `load` counts requests in flight including it."""
        self._sent += 1
        keep = 1 - 1 / MEMORY
        self._n, self._x, self._xx = keep * self._n + 1, keep * self._x + load, keep * self._xx + load**2
        self._r, self._xr = keep * self._r, keep * self._xr
        self.share *= 1 - 1 / MEMORY_OF_SHARE
        return Sent(self._sent, load)

    def record_answer(self, *, waiting: int) -> None:
        """A call was answered while `waiting` calls were queued. Without any, the limit need not grow."""
        if waiting > 0 and self._limit < self._fast_until:
            self._limit = min(self._limit + GROWTH_PER_SUCCESS, self._fast_until)
        elif waiting > 0 and waiting >= ROUNDS_TO_GROW * self._limit:
            self._limit = min(self._limit + 1 / self._limit, self.cap)
        if self._limit >= (self._fast_until if self.cause == CLOSED else self.cap):
            self.cause = ""
            FALLEN.discard(self)

    def record_overload(self, sent: Sent) -> None:
        """The service refused a request. Requests sent before the last decrease have no effect."""
        self._r, self._xr = self._r + 1, self._xr + sent.load
        self.share += 1 / MEMORY_OF_SHARE
        is_ours = self._comes_with_load()
        if sent.number <= self._sent_at_decrease or not (is_ours or self.share > MOST):
            return
        self._sent_at_decrease = self._sent
        if is_ours:
            self._fast_until = 0.0
        elif self.cause != CLOSED:
            self._fast_until = self._limit
        self._limit = max(1.0, DECREASE * self._limit)
        cause = OURS if is_ours else CLOSED
        FALLEN.add(self)
        if cause != self.cause:
            self.cause = cause
            logger.info(f"[Limit] {self._service}: concurrency lowered to {self.slots}, because {cause}")

    def _comes_with_load(self) -> bool:
        n = self._n
        covariance = n * self._xr - self._x * self._r
        spread = max(n * self._xx - self._x**2, ROUNDING * n * self._xx)
        variances = spread * (n - self._r) * self._r
        return covariance > 0 and n * covariance**2 > SIGNIFICANT**2 * variances


class HedgePolicy:
    """Decides when a call is late, and limits the number of hedges.

        late after = MARGIN x 95th percentile of the latest WINDOW latencies
        extra calls <= fraction x calls sent

    A `fraction` of 0 disables hedging.
    """

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction
        self._latencies: deque[float] = deque(maxlen=WINDOW)
        self._since_refresh = 0
        self.sent = self.hedges = 0  # calls, and hedges among them; counted by the caller
        self.late_after_s: float | None = None  # when a call is late; `None` until enough have ended

    def record_answer(self, seconds: float) -> None:
        """A call was answered after `seconds`, excluding the time in the queue."""
        self._latencies.append(seconds)
        self._since_refresh += 1
        if len(self._latencies) >= MIN_SAMPLES and (self.late_after_s is None or self._since_refresh >= REFRESH_EVERY):
            self._since_refresh = 0
            ranked = sorted(self._latencies)
            self.late_after_s = MARGIN * ranked[int(PERCENTILE * (len(ranked) - 1))]


@dataclass(eq=False)
class Flights:
    """Calls and hedges in flight, jointly within the limit. Records the failure of a request while another request for
    the same call is pending. Hedges are suspended while the `breaker` is open, and never wait for the `quota`."""

    limit: AdaptiveLimit
    hedging: HedgePolicy
    breaker: Breaker
    traffic: Counter[str]
    quota: Quota | None = None

    def __post_init__(self) -> None:
        self._taken = 0  # permits held by calls
        self._line: deque[asyncio.Future[None]] = deque()  # queued calls
        self._turned_away: dict[object, int] = {}  # calls waiting after a refusal: the number of the refused request
        self._flying: dict[_Flight[Any], None] = {}  # in sending order
        self._hedges = 0
        self._hedge_waits = False
        self._hedge_timer: asyncio.Task[None] | None = None
        self._full_since = math.inf  # when calls queued and the limit's cap was in flight; infinite if not now

    def record_sent(self) -> Sent:
        """One more request is about to be sent."""
        return self.limit.record_sent(len(self._flying) + self._hedges + 1)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Queue for a permit and hold it."""
        await self._take()
        try:
            yield
        finally:
            self._taken -= 1
            self.resize()

    async def step_aside(self, number: int, wait_s: float) -> None:
        """Release the permit of a call whose request `number` was refused, and reacquire one after `wait_s` seconds,
        at the head of the queue.

        Such calls block permits until their wait is over or a later request is answered, which shows that the service
        accepts calls. The first one blocks one permit, the second two more: n (n + 1) / 2 for n of them.
        """
        place = object()
        self._turned_away[place] = number
        self._taken -= 1
        self.resize()
        try:
            try:
                await asyncio.sleep(wait_s)
            finally:
                self._turned_away.pop(place, None)
                self.resize()
            await self._take(is_first=True)
        except BaseException:
            self._taken += 1  # the caller's context manager releases it
            raise

    async def _take(self, *, is_first: bool = False) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._line.insert(0 if is_first else len(self._line), turn)
        self.resize()
        try:
            await turn
        except BaseException:
            if not turn.cancelled():  # it got a permit at the same moment
                self._taken -= 1
                self.resize()
            elif turn in self._line:
                self._line.remove(turn)
                self.resize()
            raise

    def _free(self) -> int:
        """Permits that are neither held nor blocked. Negative after a decrease."""
        row = len(self._turned_away)
        return self.limit.slots - self._taken - self._hedges - row * (row + 1) // 2

    def resize(self) -> None:
        """Give free permits to the head of the queue. A waiting hedge gets the next one."""
        while self._line and self._free() > (1 if self._hedge_waits else 0):
            if not (turn := self._line.popleft()).done():  # otherwise its call was cancelled
                self._taken += 1
                turn.set_result(None)
        moment, is_full = now(), bool(self._line) and self._taken + self._hedges >= self.limit.cap
        self.traffic["full_ms"] += round(1000 * max(moment - self._full_since, 0))
        self._full_since = moment if is_full else math.inf

    def answered(self, sent: Sent) -> None:
        """A request was answered: the service accepts calls, in case it refused them before this one was sent."""
        self.limit.record_answer(waiting=len(self._line))
        self._turned_away = {place: number for place, number in self._turned_away.items() if number > sent.number}
        self.resize()

    def refused(self, sent: Sent) -> None:
        """The service refused a request because of overload."""
        self.traffic["overloads"] += 1
        self.limit.record_overload(sent)
        self.resize()

    async def send(self, attempt: Attempt[T], sent: Sent) -> T:
        """Run `attempt`. If it is late, send up to `MAX_HEDGES` more requests and return the first success. `sent`:
        the `limit`'s record of it."""
        self.hedging.sent += 1
        flight = _Flight(attempt, sent, self)
        self._flying[flight] = None
        if self.hedging.fraction and (self._hedge_timer is None or self._hedge_timer.done()):
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
        """Start due hedges while calls are in flight."""
        while self._flying:
            await asyncio.sleep(LOOK_EVERY_S)
            self._hedge_waits = self._start_hedges()
            self.resize()
        self._hedge_waits = False
        self.resize()

    def _start_hedges(self) -> bool:
        """Hedge late calls, oldest first. Returns whether a hedge waits for a permit."""
        if self.hedging.late_after_s is None:
            return False
        late_since = now() - self.hedging.late_after_s
        for flight in self._flying:
            is_affordable = self.hedging.hedges + 1 <= self.hedging.fraction * self.hedging.sent
            if flight.started > late_since or not is_affordable or self.breaker.is_open:
                break
            if flight.last_sent > late_since or flight.hedges == MAX_HEDGES:
                continue
            if self._free() <= 0:
                return self.limit.slots > 1
            if self.quota is not None and not self.quota.admits_now():
                return False
            flight.send(self.record_sent())
            self._hedges += 1
            self.hedging.hedges += 1
            self.traffic.update(sent=1, hedges=1)
        return False

    def failed_beside(self, error: BaseException, sent: Sent) -> None:
        """Record a request that failed while another one for the same call may still succeed."""
        if isinstance(error, ServiceOverloaded):
            self.refused(sent)
        else:
            self.traffic["timeouts" if isinstance(error, ServiceTimeout) else "failures"] += 1


class _Flight(Generic[T]):
    def __init__(self, attempt: Attempt[T], sent: Sent, flights: Flights) -> None:
        self.started = self.last_sent = now()
        self.won_by_hedge = False
        self.result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._attempt = attempt
        self._flights = flights
        self._context = contextvars.copy_context()  # another call's task sends the hedges
        self._tasks: dict[asyncio.Task[T], Sent] = {}
        self._out = 0  # pending requests
        self.send(sent)

    @property
    def hedges(self) -> int:
        return len(self._tasks) - 1

    def send(self, sent: Sent) -> None:
        """Send the request, or a hedge."""
        self.last_sent = now()
        task = asyncio.get_running_loop().create_task(self._attempt(), context=self._context.copy())
        self._tasks[task] = sent
        self._out += 1
        task.add_done_callback(self._on_done)

    def cancel(self) -> None:
        is_over = self.result.done() and not self.result.cancelled()
        is_answered = is_over and self.result.exception() is None  # retrieves it, as the caller may be cancelled
        for task in self._tasks:
            task.cancel(BEATEN if is_answered else None)

    def _on_done(self, task: asyncio.Task[T]) -> None:
        """The first success is the result. A failure is the result only if no other request is pending."""
        self._out -= 1
        if task.cancelled():
            return
        error = task.exception()
        if self.result.done():
            return
        if error is None:
            self.won_by_hedge = task is not next(iter(self._tasks))
            self.result.set_result(task.result())
        elif not self._out:  # another request may have succeeded and be processed next
            self.result.set_exception(error)
        else:
            self._flights.failed_beside(error, self._tasks[task])
