"""Circuit breaker and quota, which decide whether a call may be sent.

`judged.budget` implements the quota against a run's budget.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Protocol

from salesrl_trl.errors import DeadlineExceeded, ServiceError, ServiceUnavailable
from salesrl_trl.service.event_loop import PerLoop, now, remaining_s

FAILURES_TO_OPEN = 5  # consecutive failures. A service that answers every second call is better retried.
COOLDOWN_S = 0.25  # first pause. Short, because a connection reset by a load balancer recovers immediately.
MAX_COOLDOWN_S = 15.0  # longest pause, and so the longest delay after a service has recovered
SAME_OUTAGE_S = 60.0  # failures further apart than this, without calls in between, count as separate outages
DENIED_COOLDOWN_S = 1.0  # first pause after rejected keys or an exhausted quota, which take time to fix
MAX_DENIED_COOLDOWN_S = 60.0  # longest pause between probes in that case


class Breaker:
    """The circuit breaker of one endpoint.

        closed --- FAILURES_TO_OPEN failures in a row ---> open for a pause
        open   --- pause over, next caller ---> probing (that caller only)
        probing --- answered ---> closed;  failed ---> open for twice the pause

    An answer to a call sent before the breaker opened also closes it: the endpoint is alive.

    A denial (a rejected key, an exhausted quota) counts as a failure, because an isolated one is a glitch. If a random
    share p of calls is denied, a run of denials opens the breaker with probability p ** FAILURES_TO_OPEN: 1e-10 at
    1 %. If denials make up more than half of the failures, the breaker opens for denials, with pauses of up to
    `MAX_DENIED_COOLDOWN_S`. If the endpoint has never answered, waiting can't help.

    With an infinite `failures_to_open` it never opens.
    """

    def __init__(self, failures_to_open: float = FAILURES_TO_OPEN) -> None:
        self._failures_to_open = failures_to_open
        self._has_answered = False
        self._failures = 0  # consecutive
        self._denials = 0  # among them
        self._down_since = self._latest = 0.0  # times of the first and the last of them
        self._cooldown_s = COOLDOWN_S
        self._open_until: float | None = None
        self.is_probing = False
        self.probe = 0  # number of the latest probe; 0 before the first one
        self.denial: str | None = None  # error code if denials opened it; `None` if other failures did

    @property
    def is_open(self) -> bool:
        return self._open_until is not None

    @property
    def is_hopeless(self) -> bool:
        """Whether the endpoint denies access and has never answered: a wrong key, which waiting can't fix."""
        return self.denial is not None and not self._has_answered

    def permit(self, now: float) -> int | None:
        """What a caller may send at time `now`, in seconds on any monotonic clock: nothing (`None`), a request (0), or
        the probe with this number, which checks whether the endpoint has recovered."""
        if self._open_until is None:
            return 0
        if self.is_probing or now < self._open_until:
            return None
        self.is_probing = True
        self.probe += 1
        return self.probe

    def down_for_s(self, now: float) -> float:
        """Seconds since the first failure after the latest answer; 0 without failures."""
        return now - self._down_since if self._failures else 0.0

    def pause_left_s(self, now: float) -> float:
        """Seconds until a probe may be sent; 0 while one is in flight."""
        return 0.0 if self._open_until is None or self.is_probing else max(self._open_until - now, 0.0)

    def record_answer(self) -> None:
        """A call was answered. An error specific to that call also counts as an answer."""
        self._has_answered = True
        self._failures = self._denials = 0
        self._open_until = None
        self.is_probing = False
        self.denial = None

    def record_failure(self, now: float, *, probe: int = 0, denial: str | None = None, pause_s: float = 0.0) -> None:
        """A call failed for a reason that may affect every call. `probe` is its number if it was a probe; a superseded
        probe counts as an ordinary call. `denial` is the error code if access was denied. The endpoint asked for a
        pause of `pause_s`."""
        if not self._failures or (not self.is_open and now - self._latest > SAME_OUTAGE_S):
            self._down_since = now
        self._latest = now
        self._failures += 1
        self._denials += denial is not None
        if self.is_probing and probe == self.probe:
            self.denial = denial
            self._cooldown_s *= 2
        elif self.is_open or self._failures < self._failures_to_open:
            return
        else:
            self.denial = denial if 2 * self._denials > self._failures else None
            self._cooldown_s = COOLDOWN_S if self.denial is None else DENIED_COOLDOWN_S
        most_s = MAX_COOLDOWN_S if self.denial is None else MAX_DENIED_COOLDOWN_S
        self._cooldown_s = min(self._cooldown_s, most_s)
        self._open_until = now + max(self._cooldown_s, min(pause_s, most_s))
        self.is_probing = False

    def record_abandoned(self, probe: int) -> None:
        """The probe with that number was cancelled. The next caller becomes the probe."""
        if self.is_probing and probe == self.probe:
            self.is_probing = False


LEAST_WAIT_S = 1e-6  # a shorter wait vanishes in clock rounding, and the call would spin forever


class Gate:
    """Admits calls according to the breaker's state, and wakes waiting calls when it changes."""

    def __init__(self, service: str, breaker: Breaker, traffic: Counter[str]) -> None:
        self._service = service
        self.breaker = breaker
        self._traffic = traffic
        self._changed: PerLoop[asyncio.Event] = PerLoop(asyncio.Event)

    def is_out_of_patience(self, patience_s: float) -> bool:
        return self.breaker.is_open and self.breaker.down_for_s(now()) >= patience_s

    def refuse_if_hopeless(self, patience_s: float) -> None:
        """Raise `ServiceUnavailable` if waiting can't help or the caller is out of patience."""
        is_paused = self.breaker.pause_left_s(now()) > 0
        is_late = self.is_out_of_patience(patience_s) and (is_paused or self.breaker.is_probing)
        if is_late or (is_paused and self.breaker.is_hopeless):
            self._traffic["held_back"] += 1
            code = self.breaker.denial or f"{self._service}_breaker_open"
            error = ServiceUnavailable(f"{self._service} was not called, because its latest calls failed", code)
            error.worth_retrying = False
            raise error

    async def permitted(self, patience_s: float) -> int:
        """Wait for a permit. Raises like `refuse_if_hopeless`, or `DeadlineExceeded`."""
        while True:
            if remaining_s() <= 0:
                raise DeadlineExceeded.before_answer_of(self._service)
            self.refuse_if_hopeless(patience_s)
            moment = now()
            if (permit := self.breaker.permit(moment)) is not None:
                return permit
            pause_s = self.breaker.pause_left_s(moment) or float("inf")
            patience_left_s = patience_s - self.breaker.down_for_s(moment)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(min(pause_s, patience_left_s, remaining_s()), LEAST_WAIT_S)):
                    await self._changed.get().wait()

    def record_failure(self, probe: int, *, pause_s: float = 0.0, denial: str | None = None) -> None:
        self.breaker.record_failure(now(), probe=probe, pause_s=pause_s, denial=denial)
        self._wake()

    def record_abandoned(self, probe: int) -> None:
        """A request ended without evidence about the service's state."""
        if probe:
            self.breaker.record_abandoned(probe)
            self._wake()

    def record_answer(self) -> None:
        """The service answered, successfully or not: an open breaker closes, and waiting calls proceed."""
        was_open = self.breaker.is_open
        self.breaker.record_answer()
        if was_open:
            self._wake()

    def _wake(self) -> None:
        self._changed.get().set()
        self._changed.get().clear()


class SharedBudget(Protocol):
    """The spending limits shared by a run's processes, and what they have spent."""

    def settle(self) -> None:
        """Write down the spending and release reservations."""

    def joined(self, others: Iterable["SharedBudget"]) -> "SharedBudget":
        """One budget with the limits of all, which share an account."""

    def in_words(self) -> str:
        """The limits and the spending so far. Raises `ConfigError` if the account can't be read."""


class Quota(Protocol):
    """Counts the requests to one service against a budget and per-minute rates."""

    budget: SharedBudget

    @property
    def is_spent(self) -> bool:
        """Whether a limit has refused a request."""

    async def admit(self) -> None:
        """Wait until a request may be sent, and count it. Raises `BudgetSpent` if a limit is reached, `ServiceError`
        if the account is unusable, and `TimeoutError` if the deadline expires first."""

    def admits_now(self) -> bool:
        """Count one more request if it may be sent without waiting."""

    def give_back(self) -> None:
        """Return an admitted request that is not sent after all."""

    def charge(self, tokens: tuple[float, float] | None, *, is_stated: bool = False) -> None:
        """Charge a finished request for its prompt and completion tokens; `None`, if unknown, charges the mean.
        `is_stated`: whether the provider reported them."""


@dataclass
class Bill(AbstractContextManager["Bill"]):
    """The bill of one request to a provider: `with transport.bill() as bill: ...; bill.count(prompt, completion)`.

    An interrupted request, or one whose answer reports no usage, is billed at the mean of the others. A request that
    failed with an error status, or could not be sent, is free. Without a quota nothing is billed.
    """

    quota: Quota | None
    tokens: tuple[int, int] | None = None

    def count(self, prompt_tokens: int, completion_tokens: int) -> None:
        self.tokens = (prompt_tokens, completion_tokens)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.quota is None:
            return
        is_free = isinstance(error, ServiceUnavailable) or (isinstance(error, ServiceError) and bool(error.status))
        self.quota.charge(self.tokens or ((0, 0) if is_free else None), is_stated=self.tokens is not None)
