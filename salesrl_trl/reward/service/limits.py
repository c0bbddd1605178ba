"""The limit of calls in flight to a service: slow start, then additive increase and multiplicative decrease.

Owns the law and its state. Pure: no clock, no event loop, no service. `transport` and `flights` record what happened.
"""

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
        self._cap = cap
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
            self._limit = min(self._limit + (GROWTH_PER_SUCCESS if self._slow_start else 1 / self._limit), self._cap)

    def record_overload(self, number: int) -> None:
        """The service turned the call `number` away. One that was sent before the last decrease says nothing new."""
        if number <= self._sent_at_decrease:
            return
        self._sent_at_decrease = self._sent
        self._slow_start = False
        self._limit = max(1.0, DECREASE * self._limit)
