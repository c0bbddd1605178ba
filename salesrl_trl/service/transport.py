"""One call to one service: its retries, timeouts and concurrency.

The only module that retries. A call holds a concurrency permit until it ends, except while it waits after a refusal.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from salesrl_trl import errors
from salesrl_trl.service.breaker import Bill, Breaker, Gate, Quota, SharedBudget
from salesrl_trl.service.event_loop import PerLoop, deadline, now, remaining_s
from salesrl_trl.service.flights import AdaptiveLimit, Attempt, Flights, HedgePolicy, Sent
from salesrl_trl.service.statuses import service_error_of
from salesrl_trl.telemetry.completion_record import CallNote, note_wait

T = TypeVar("T")

RETRY_WAIT_INITIAL_S = 0.2
RETRY_WAIT_MAX_S = 5.0  # longest wait between attempts, unless Retry-After asks for more
RETRY_JITTER_S = 0.2  # maximum random delay, so that calls that failed together are not retried together
OVERLOAD_WAIT_S = 1.0  # wait after a 429 without Retry-After
MAX_OVERLOADS = 64  # refusals after which a call gives up. Usually its deadline expires first.
TRAFFIC = (
    "calls", "sent", "retries", "overloads", "timeouts", "failures", "held_back", "hedges", "hedges_won", "full_ms",
)  # fmt: skip
"""Names of the counters: `calls` made; requests `sent`, including hedges; among them `retries`, `overloads` (refused),
`timeouts`, other `failures`; calls `held_back` by an open breaker; `hedges`, extra requests for late calls, and
`hedges_won`, those that were faster; `full_ms`, milliseconds with calls queued at the highest concurrency limit."""


class Transport:
    """Runs attempts against one service until one succeeds or retrying can't help.

    Args:
        service (`str`):
            Name in errors and reason codes, e.g. `"rag_8b"`.
        max_concurrency (`int`):
            Maximum number of concurrent calls.
        attempt_timeout_s (`float`):
            Timeout of one attempt in seconds, including the body but not the time in the queue.
        max_attempts (`int`):
            Maximum number of failed attempts, including the first. A request to retry later does not count.
        initial_concurrency (`int`, *optional*, defaults to `8`):
            Initial concurrency limit, which grows while the service keeps up.
        outage_patience_s (`float`, *optional*, defaults to `0.0`):
            Seconds that calls wait for an unavailable service, counted from the start of the outage. After that they
            fail immediately, and only single probes are sent.
        hedge_fraction (`float`, *optional*, defaults to `0.05`):
            Maximum share of extra requests for late calls; 0 disables hedging.
        quota (`Quota`, *optional*):
            Counts every request against the run's budget.
        breaker (`Breaker`, *optional*):
            Replaces the default circuit breaker.
    """

    def __init__(
        self, service: str, *, max_concurrency: int, attempt_timeout_s: float, max_attempts: int,
        initial_concurrency: int = 8, outage_patience_s: float = 0.0, hedge_fraction: float = 0.05,
        quota: Quota | None = None, breaker: Breaker | None = None,
    ) -> None:  # fmt: skip
        self.service, self.max_concurrency = service, max_concurrency
        self.notes = True  # whether completion records include each attempt
        self._attempt_timeout_s, self._max_attempts = attempt_timeout_s, max_attempts
        self._outage_patience_s = outage_patience_s
        self._limit = AdaptiveLimit(initial_concurrency, max_concurrency, service)
        self._hedging = HedgePolicy(hedge_fraction)
        self._traffic: Counter[str] = Counter()
        self._gate = Gate(service, breaker or Breaker(), self._traffic)
        self.count_by(quota)

    def count_by(self, quota: Quota | None) -> None:
        """Count every request against the run's budget. Call it before the first request."""
        self._quota = quota
        self._flights: PerLoop[Flights] = PerLoop(self._make_flights)

    def _make_flights(self) -> Flights:
        return Flights(self._limit, self._hedging, self._gate.breaker, self._traffic, self._quota)

    def drain_traffic(self) -> dict[str, int]:
        """The counters since the last call, by the names in `TRAFFIC`, and the current concurrency limit (`slots`)."""
        counts = {name: self._traffic[name] for name in TRAFFIC} | {"slots": self._limit.slots}
        self._traffic.clear()
        return counts

    async def call(self, attempt: Callable[[], Awaitable[T]], *, patient: bool = True) -> T:
        """Run `attempt`, one request including its whole answer, until it succeeds. Attempts may run concurrently.

        A `patient` call waits out outages and refusals. An impatient call, for which a fallback service exists, gets
        half of the remaining time and fails at the first refusal.

        Raises `BudgetSpent`, or the last attempt's `ServiceError`.
        """
        self._traffic["calls"] += 1
        patience_s = self._outage_patience_s if patient else 0.0
        self._gate.refuse_if_hopeless(patience_s)  # before queueing, so that callers fail fast during an outage
        began = now()

        async def noted() -> T:
            with CallNote(self.service) if self.notes else nullcontext():
                return await attempt()

        with deadline(remaining_s() if patient else remaining_s() / 2):
            try:
                async with asyncio.timeout(remaining_s()) as waiting, self._flights.get().slot():
                    waiting.reschedule(None)  # from here on, attempts and waits check the deadline themselves
                    note_wait(now() - began)
                    return await self._with_retries(noted, patient, patience_s)
            except TimeoutError:
                raise errors.DeadlineExceeded.before_answer_of(self.service) from None

    @property
    def budget(self) -> SharedBudget | None:
        """The budget that its requests count against."""
        return None if self._quota is None else self._quota.budget

    @property
    def is_spent(self) -> bool:
        return self._quota is not None and self._quota.is_spent

    async def admit(self) -> None:
        """Wait until the budget admits one more request. Raises `BudgetSpent` or `DeadlineExceeded`."""
        try:
            if self._quota is not None:
                await self._quota.admit()
        except TimeoutError:
            raise errors.DeadlineExceeded.before_answer_of(self.service) from None

    def bill(self) -> Bill:
        return Bill(self._quota)

    async def _with_retries(self, attempt: Attempt[T], patient: bool, patience_s: float) -> T:
        retries = _Retries(self._max_attempts, patient, patience_s, self._gate)
        while True:
            try:
                return await self._once(attempt, patience_s)
            except errors.ServiceError as error:
                wait_s = retries.wait_s(error)
                if wait_s is None:
                    raise
                turned_away = error.request if isinstance(error, errors.ServiceOverloaded) else None
            if turned_away is not None:
                async with asyncio.timeout(remaining_s()):
                    await self._flights.get().step_aside(turned_away, wait_s)
            else:
                await asyncio.sleep(wait_s)
            self._traffic["retries"] += 1

    async def _once(self, attempt: Attempt[T], patience_s: float) -> T:
        await self.admit()
        try:
            probe = await self._gate.permitted(patience_s)
        except BaseException:
            if self._quota is not None:
                self._quota.give_back()
            raise
        sent = self._flights.get().record_sent()
        with self._observed(sent, probe):
            left_s = remaining_s()
            try:
                async with asyncio.timeout(min(self._attempt_timeout_s, left_s)):
                    self._traffic["sent"] += 1
                    return await (attempt() if probe else self._flights.get().send(attempt, sent))
            except TimeoutError:
                if left_s < self._attempt_timeout_s:
                    raise errors.DeadlineExceeded.before_answer_of(self.service) from None
                text = f"{self.service} sent no complete answer within {self._attempt_timeout_s:g} s"
                raise errors.ServiceTimeout(text, code=f"{self.service}_timeout") from None
            except Exception as error:  # from the attempt's HTTP client
                failure = None if isinstance(error, errors.ServiceError) else service_error_of(self.service, error)
                if failure is None:
                    raise
                raise failure from None

    @contextmanager
    def _observed(self, sent: Sent, probe: int) -> Iterator[None]:
        try:
            yield
        except errors.ServiceOverloaded as error:
            if error.is_outage:
                self._gate.record_failure(probe, pause_s=error.retry_after_s or 0.0)
            else:
                self._gate.record_answer()
            error.request = sent.number
            self._flights.get().refused(sent)
            raise
        except (errors.DeadlineExceeded, errors.BudgetSpent):
            self._gate.record_abandoned(probe)
            raise
        except (errors.AccessDenied, errors.ServiceUnavailable, errors.ServiceTimeout) as error:
            self._traffic["timeouts" if isinstance(error, errors.ServiceTimeout) else "failures"] += 1
            denial = error.code if isinstance(error, errors.AccessDenied) else None
            self._gate.record_failure(probe, denial=denial)
            raise
        except errors.ServiceError:  # specific to this call: the service is alive
            self._traffic["failures"] += 1
            self._gate.record_answer()
            raise
        except BaseException:
            self._gate.record_abandoned(probe)
            raise
        self._gate.record_answer()
        self._flights.get().answered(sent)


@dataclass(slots=True)
class _Retries:
    max_attempts: int
    patient: bool
    patience_s: float
    gate: Gate
    failures: int = 0
    overloads: int = 0
    down_since: float = float("inf")

    def wait_s(self, error: errors.ServiceError) -> float | None:
        """Seconds to wait before the next attempt; `None` to give up."""
        if isinstance(error, errors.ServiceOverloaded):
            self.overloads += 1
            wait_s = OVERLOAD_WAIT_S if error.retry_after_s is None else error.retry_after_s
            if wait_s < RETRY_WAIT_INITIAL_S:  # an overloaded service can't mean "now"
                wait_s = _usual_s(self.overloads)
            goes_on = self.overloads < (MAX_OVERLOADS if self.patient else 1)
            if error.is_outage and self.patience_s:  # a reported outage: same patience as for any other
                moment = now()
                self.down_since = min(self.down_since, moment - self.gate.breaker.down_for_s(moment))
                left_s = self.patience_s - (moment - self.down_since)
                wait_s, goes_on = min(wait_s, left_s), goes_on and left_s > 0
            elif error.is_outage:
                self.failures += 1
                goes_on = goes_on and self.failures < self.max_attempts
        elif not error.worth_retrying:
            return None
        else:
            self.failures += 1
            wait_s = _usual_s(self.failures)
            goes_on = self.failures < self.max_attempts and not self.gate.is_out_of_patience(self.patience_s)
            if isinstance(error, errors.AccessDenied):  # give up if there is a fallback, or access was never granted
                goes_on = goes_on and self.patient and not self.gate.breaker.is_hopeless
        wait_s += random.uniform(0, RETRY_JITTER_S)
        return wait_s if goes_on and wait_s < remaining_s() else None


def _usual_s(times: int) -> float:
    return float(min(RETRY_WAIT_INITIAL_S * 2 ** (times - 1), RETRY_WAIT_MAX_S))
