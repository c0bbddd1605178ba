"""A breaker: after some failures in a row no call is sent to an endpoint; single probes find out whether it is back.

Owns the states and their law. Pure: `transport` hands in the time, records what happened, and does the waiting.
"""

from enum import Enum, auto

FAILURES_TO_OPEN = 5
"""Failures in a row that open the breaker. A service that answers every second call is better retried."""
COOLDOWN_S = 0.25  # first pause. It is short: a connection that a load balancer resets is back at once.
MAX_COOLDOWN_S = 15.0
"""Longest pause between two probes: calls go out again at the latest so long after the service is back."""
SAME_OUTAGE_S = 60.0  # two failures further apart than this, with no call between them, count as two outages
DENIED_COOLDOWN_S = 1.0
"""First pause after refused keys or a used-up quota. Nobody mends those in a quarter of a second."""
MAX_DENIED_COOLDOWN_S = 60.0
"""Longest pause between two probes after refused keys or a used-up quota, unless a run sets another."""


class Permit(Enum):
    """The action that a caller is allowed now."""

    SEND = auto()
    PROBE = auto()
    """Send one request that finds out whether the endpoint is back, and record it with the breaker's `probe`."""
    WAIT = auto()  # wait: a probe is out, or the pause is not over


class Breaker:
    """State of one endpoint.

        closed --- FAILURES_TO_OPEN failures in a row ---> open for a pause
        open   --- pause over, next caller ---> probing (that one caller)
        probing --- answered ---> closed;  failed ---> open for twice the pause

    An answer to a call that was sent before the breaker opened closes it too: the endpoint is alive.

    A denial (a refused key, a used-up quota) counts as a failure, because a single one among answers is a slip. If
    denials come at random in a share p of all calls, a row that opens the breaker has the probability p **
    FAILURES_TO_OPEN: 1e-10 at 1 %. If more than half of the row are denials, the breaker opens for denials. Then
    pauses are longer, up to `max_denied_cooldown_s`. And if the endpoint never answered at all, waiting can't help.

    With an infinite `failures_to_open` it never opens.
    """

    def __init__(
        self, max_denied_cooldown_s: float = MAX_DENIED_COOLDOWN_S, failures_to_open: float = FAILURES_TO_OPEN
    ) -> None:
        self._failures_to_open = failures_to_open
        self._max_denied_cooldown_s = max_denied_cooldown_s
        self._has_answered = False
        self._failures = 0  # in a row
        self._denials = 0  # among them
        self._down_since = self._latest = 0.0  # the first of them, the last of them
        self._cooldown_s = COOLDOWN_S
        self._open_until: float | None = None
        self.is_probing = False
        self.probe = 0  # number of the latest probe: 0 before the first one
        self.denial: str | None = None
        """The code of the denials that opened the breaker; `None` if other failures opened it."""

    @property
    def is_open(self) -> bool:
        """Whether callers have to wait."""
        return self._open_until is not None

    @property
    def is_hopeless(self) -> bool:
        """Whether the endpoint denies access and never answered: a wrong key, which no waiting mends."""
        return self.denial is not None and not self._has_answered

    def permit(self, now: float) -> Permit:
        """The permit of a caller at the moment `now`, in seconds of any steady clock."""
        if self._open_until is None:
            return Permit.SEND
        if self.is_probing or now < self._open_until:
            return Permit.WAIT
        self.is_probing = True
        self.probe += 1
        return Permit.PROBE

    def down_for_s(self, now: float) -> float:
        """Seconds since the first failure without an answer after it; 0 while there is none."""
        return now - self._down_since if self._failures else 0.0

    def pause_left_s(self, now: float) -> float:
        """Seconds until a probe may go; 0 while one is out."""
        return 0.0 if self._open_until is None or self.is_probing else max(self._open_until - now, 0.0)

    def record_answer(self) -> None:
        """A call was answered. An error that is about that call alone is an answer, too."""
        self._has_answered = True
        self._failures = self._denials = 0
        self._open_until = None
        self.is_probing = False
        self.denial = None

    def record_failure(self, now: float, *, probe: int = 0, denial: str | None = None, pause_s: float = 0.0) -> None:
        """A call failed at the moment `now`, for a reason that may concern every call. `probe` is its number if it was
        a probe: one that was replaced counts as any other call. `denial` is the error's code if access was denied.
        For `pause_s` the endpoint asked for no calls."""
        if not self._failures or (not self.is_open and now - self._latest > SAME_OUTAGE_S):
            self._down_since = now
        self._latest = now
        self._failures += 1
        self._denials += denial is not None
        if self._is_out(probe):
            self.denial = denial
            self._cooldown_s *= 2
        elif self.is_open or self._failures < self._failures_to_open:
            return
        else:
            self.denial = denial if 2 * self._denials > self._failures else None
            self._cooldown_s = COOLDOWN_S if self.denial is None else DENIED_COOLDOWN_S
        most_s = MAX_COOLDOWN_S if self.denial is None else self._max_denied_cooldown_s
        self._cooldown_s = min(self._cooldown_s, most_s)
        self._open_until = now + max(self._cooldown_s, min(pause_s, most_s))
        self.is_probing = False

    def record_abandoned(self, probe: int) -> None:
        """The probe of that number was cancelled before it ended. The next caller is the probe."""
        if self._is_out(probe):
            self.is_probing = False

    def _is_out(self, probe: int) -> bool:
        return self.is_probing and probe == self.probe
