"""Hedging: a call that takes unusually long is sent a second time.

Owns the measured percentile and the budget of extra calls. Pure: no clock, no event loop. `flights` asks it.
"""

from collections import deque

PERCENTILE = 0.95
"""A call is late when 95 % of the recent calls were faster."""
MARGIN = 1.3
"""Factor on the percentile. With it few calls that are merely slow are sent twice; the budget is for stragglers."""
WINDOW = 256
"""The percentile is taken over this many latest calls."""
MIN_SAMPLES = 20
"""With fewer calls there is no percentile."""
REFRESH_EVERY = 16
"""Calls between two computations of the percentile."""


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
        self._sent = 0
        self._hedges = 0
        self.late_after_s: float | None = None
        """Seconds after which a call is late; `None` until enough is known."""

    @property
    def enabled(self) -> bool:
        """Whether extra calls are allowed at all."""
        return self._fraction > 0

    @property
    def affordable(self) -> bool:
        """Whether one more extra call stays within the budget."""
        return self._hedges + 1 <= self._fraction * self._sent

    def record_sent(self) -> None:
        """A first call was sent."""
        self._sent += 1

    def record_hedge(self) -> None:
        """An extra call was sent."""
        self._hedges += 1

    def record_answer(self, seconds: float) -> None:
        """A call was answered after `seconds`, without the time in the queue."""
        self._latencies.append(seconds)
        self._since_refresh += 1
        if len(self._latencies) >= MIN_SAMPLES and (self.late_after_s is None or self._since_refresh >= REFRESH_EVERY):
            self._since_refresh = 0
            ranked = sorted(self._latencies)
            self.late_after_s = MARGIN * ranked[int(PERCENTILE * (len(ranked) - 1))]
