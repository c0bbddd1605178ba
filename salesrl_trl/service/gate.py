"""Which calls to a service are sent while its breaker is open, and which wait or are refused. `transport` calls it."""

import asyncio
from collections import Counter
from contextlib import suppress

from salesrl_trl.errors import DeadlineExceeded, ServiceUnavailable
from salesrl_trl.service.breaker import Breaker, Permit
from salesrl_trl.service.event_loop import PerLoop, now, remaining_s

LEAST_WAIT_S = 1e-6  # a shorter wait is lost in the rounding of a clock, and the call would look again without end


class Gate:
    """Lets calls pass by the breaker's state, and wakes those that wait when it changes."""

    def __init__(self, service: str, breaker: Breaker, traffic: Counter[str]) -> None:
        self._service = service
        self._breaker = breaker
        self._traffic = traffic
        self._changed: PerLoop[asyncio.Event] = PerLoop(asyncio.Event)

    def is_out_of_patience(self, patience_s: float) -> bool:
        return self._breaker.is_open and self._breaker.down_for_s(now()) >= patience_s

    def refuse_if_hopeless(self, patience_s: float) -> None:
        """Raise `ServiceUnavailable` if waiting can't help or is not wanted."""
        if not self._breaker.is_open:
            return
        is_paused = self._breaker.pause_left_s(now()) > 0
        is_hopeless = is_paused and self._breaker.is_hopeless
        is_late = self.is_out_of_patience(patience_s) and (is_paused or self._breaker.is_probing)
        if is_hopeless or is_late:
            self._traffic["held_back"] += 1
            code = self._breaker.denial or f"{self._service}_breaker_open"
            error = ServiceUnavailable(f"{self._service} was not asked, because its latest calls failed", code)
            error.worth_retrying = False
            raise error

    async def permitted(self, patience_s: float) -> int:
        """Wait until a request may be sent. Returns the number of the probe if the request is one, else 0. Raises as
        `refuse_if_hopeless`, or `DeadlineExceeded`."""
        while True:
            if remaining_s() <= 0:
                raise DeadlineExceeded.before_answer_of(self._service)
            self.refuse_if_hopeless(patience_s)
            moment = now()
            permit = self._breaker.permit(moment)
            if permit is not Permit.WAIT:
                return self._breaker.probe if permit is Permit.PROBE else 0
            pause_s = self._breaker.pause_left_s(moment) or float("inf")
            patience_left_s = patience_s - self._breaker.down_for_s(moment)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(min(pause_s, patience_left_s, remaining_s()), LEAST_WAIT_S)):
                    await self._changed.get().wait()

    def record_failure(self, probe: int, *, pause_s: float = 0.0, denial: str | None = None) -> None:
        self._breaker.record_failure(now(), probe=probe, pause_s=pause_s, denial=denial)
        self._wake()

    def record_abandoned(self, probe: int) -> None:
        """A request has ended in a way that says nothing about the service."""
        if probe:
            self._breaker.record_abandoned(probe)
            self._wake()

    def record_answer(self) -> None:
        """The service answered, well or not: an open breaker closes, and the calls that wait for it go on."""
        was_open = self._breaker.is_open
        self._breaker.record_answer()
        if was_open:
            self._wake()

    def _wake(self) -> None:
        changed = self._changed.get()
        changed.set()
        changed.clear()
