"""The law of `tokens_per_minute`: how long a request waits for its tokens. Pure; `budget` waits by it."""

BURST = 1 / 12
"""Share of `tokens_per_minute` that may be sent at once. The rest flows in at an even rate, so that no minute has more
than the limit."""


class TokenRate:
    """A level of tokens that grows evenly up to a burst.

    A request takes what it is expected to have, and settles the difference when it has ended. It waits until the level
    is as high, or at its highest. `per_minute`: most tokens of any minute.
    """

    def __init__(self, per_minute: float) -> None:
        self._burst = per_minute * BURST
        self._per_second = per_minute * (1 - BURST) / 60
        self._level = self._burst
        self._at: float | None = None

    def wait_s(self, now: float, tokens: float) -> float:
        """Seconds until a request of so many tokens may be sent; 0 for at once."""
        if self._at is not None:
            self._level = min(self._level + max(now - self._at, 0.0) * self._per_second, self._burst)
        self._at = now
        return max(min(tokens, self._burst) - self._level, 0.0) / self._per_second

    def take(self, tokens: float) -> None:
        """A request of so many tokens is about to be sent. A negative number gives back."""
        self._level -= tokens
