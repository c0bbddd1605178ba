"""How many calls a service is given at once: slow start, then additive increase and multiplicative decrease.

Owns the law and its state. Pure: no clock, no event loop, no service; the transport reports what happened.
"""

GROWTH_PER_SUCCESS = 0.5
"""Of the slow start: each answer adds half a slot, so a round of full slots grows the limit by half. Doubling would
overshoot a service's limit by up to its own size, and every call above it is an error answer."""
DECREASE = 0.8
"""Factor after an overload. A service that takes 16 calls is probed again at 17 after three rounds or so, and keeps
nine tenths of its slots busy meanwhile."""


ROUNDS_TO_GROW = 3
"""Rounds of calls that must wait before another slot is tried once the service has said no: the call that is turned
away for it comes last otherwise, and everything waits for it."""


class AdaptiveLimit:
    """Calls in flight that a service is given.

    While calls wait for a slot, an answer raises the limit L:

        L <- L + 1/2    until the first overload (slow start)
        L <- L + 1/L    after it (one more slot for a round of answers), where ROUNDS_TO_GROW x L calls wait or more

    and an overload lowers it, once for all calls that were in flight together:

        L <- max(1, 0.8 L)

    Args:
        start (`int`):
            First limit.
        cap (`int`):
            Highest limit.
    """

    def __init__(self, start: int, cap: int) -> None:
        self._cap = cap
        self._limit = float(min(start, cap))
        self._slow_start = True
        self._sent = 0
        self._sent_at_decrease = -1

    @property
    def slots(self) -> int:
        """The limit in whole calls, at least 1."""
        return int(self._limit)

    def sent(self) -> int:
        """Count a call about to be sent; returns its number, to be handed back to `overloaded`."""
        self._sent += 1
        return self._sent

    def answered(self, *, waiting: int) -> None:
        """A call was answered while so many waited for a slot; without any there is nothing to grow for."""
        if waiting > 0 and (self._slow_start or waiting >= ROUNDS_TO_GROW * self._limit):
            self._limit = min(self._limit + (GROWTH_PER_SUCCESS if self._slow_start else 1 / self._limit), self._cap)

    def overloaded(self, number: int) -> None:
        """The service turned the call `number` away. One sent before the last decrease tells nothing more."""
        if number <= self._sent_at_decrease:
            return
        self._sent_at_decrease = self._sent
        self._slow_start = False
        self._limit = max(1.0, DECREASE * self._limit)
