"""A breaker: after some failures in a row an endpoint is left alone, and single probes find out whether it is back.

Owns the states and their law. Pure: the caller says what time it is and what happened, and does the waiting.
"""

from enum import Enum, auto

FAILURES_TO_OPEN = 5
"""In a row, without an answer between them: one or two are everyday, and a service that answers every second call is
better retried than left alone."""
COOLDOWN_S = 0.25
"""First pause. Short, because a connection reset by a load balancer that moved is over at once."""
MAX_COOLDOWN_S = 15.0
"""Longest pause between two probes: what a service that comes back is kept waiting at most."""
SAME_OUTAGE_S = 60.0
"""Failures further apart, with nothing between them, are not of one outage: nobody called in that time."""
DENIED_COOLDOWN_S = 1.0
"""First pause after refused keys or a used-up quota, which nobody mends in a quarter of a second."""
MAX_DENIED_COOLDOWN_S = 60.0
"""Longest pause between two probes then, unless a run sets another."""


class Permit(Enum):
    """What a caller may do now."""

    SEND = auto()
    """The endpoint is well."""
    PROBE = auto()
    """The caller is the one that finds out. It has to report back by `answered`, `failed` or `abandoned`, the latter
    two with the breaker's `probe` of this moment."""
    WAIT = auto()
    """Another one is finding out, or the pause is not over."""


class Breaker:
    """State of one endpoint.

        closed --- FAILURES_TO_OPEN failures in a row ---> open for a pause
        open   --- pause over, next caller ---> probing (that one caller)
        probing --- answered ---> closed;  failed ---> open for twice the pause

    An answer to a call that was sent before closes it too: it is proof of life.

    A denial (a refused key, a used-up quota) counts as a failure: one among answers is a slip. Of random ones at a
    share p of all calls, a row that opens it has the probability p ** FAILURES_TO_OPEN: 1e-10 at 1 %. Where more than
    half of the row were denials, it is denials that opened it: pauses are longer, and where the endpoint never
    answered at all, there is no use in waiting.

    Args:
        max_denied_cooldown_s (`float`, *optional*, defaults to `MAX_DENIED_COOLDOWN_S`):
            Longest pause between two probes of an endpoint that denies access.
    """

    def __init__(self, max_denied_cooldown_s: float = MAX_DENIED_COOLDOWN_S) -> None:
        self._max_denied_cooldown_s = max_denied_cooldown_s
        self._has_answered = False
        self._failures = 0  # in a row
        self._denials = 0  # among them
        self._down_since = self._latest = 0.0  # the first of them, the last of them
        self._cooldown_s = COOLDOWN_S
        self._open_until: float | None = None
        self._probing = False
        self._probe = 0
        self._denial: str | None = None

    @property
    def probe(self) -> int:
        """Number of the latest probe, at least 1 once there was one."""
        return self._probe

    @property
    def is_open(self) -> bool:
        """Whether callers are held back."""
        return self._open_until is not None

    @property
    def is_probing(self) -> bool:
        """Whether a probe is out."""
        return self._probing

    @property
    def denial(self) -> str | None:
        """Code of the refusals that opened it, where it was refusals."""
        return self._denial

    @property
    def is_hopeless(self) -> bool:
        """Whether it denies access and never did anything else: a wrong key, which no waiting mends."""
        return self._denial is not None and not self._has_answered

    def permit(self, now: float) -> Permit:
        """What a caller may do at the moment `now`, in seconds of any steady clock."""
        if self._open_until is None:
            return Permit.SEND
        if self._probing or now < self._open_until:
            return Permit.WAIT
        self._probing = True
        self._probe += 1
        return Permit.PROBE

    def down_for_s(self, now: float) -> float:
        """Seconds since the first failure without an answer after it; 0 while there is none."""
        return now - self._down_since if self._failures else 0.0

    def pause_left_s(self, now: float) -> float:
        """Seconds until a probe may go; 0 while one is out."""
        return 0.0 if self._open_until is None or self._probing else max(self._open_until - now, 0.0)

    def answered(self) -> None:
        """A call was answered, be it by an error that is about the call alone."""
        self._has_answered = True
        self._failures = self._denials = 0
        self._open_until = None
        self._probing = False
        self._denial = None

    def failed(self, now: float, *, probe: int = 0, denial: str | None = None, pause_s: float = 0.0) -> None:
        """A call failed in a way that says something about the endpoint.

        Args:
            now (`float`):
                The moment, in seconds of any steady clock.
            probe (`int`, *optional*, defaults to `0`):
                Its number where it was a probe. One that has been overtaken counts like any other call.
            denial (`str`, *optional*):
                The error's code, where access was denied.
            pause_s (`float`, *optional*, defaults to `0.0`):
                How long the endpoint asked to be left alone.
        """
        if not self._failures or (not self.is_open and now - self._latest > SAME_OUTAGE_S):
            self._down_since = now
        self._latest = now
        self._failures += 1
        self._denials += denial is not None
        if self._is_out(probe):
            self._denial = denial
            self._cooldown_s *= 2
        elif self.is_open or self._failures < FAILURES_TO_OPEN:
            return
        else:
            self._denial = denial if 2 * self._denials > self._failures else None
            self._cooldown_s = COOLDOWN_S if self._denial is None else DENIED_COOLDOWN_S
        most_s = MAX_COOLDOWN_S if self._denial is None else self._max_denied_cooldown_s
        self._cooldown_s = min(self._cooldown_s, most_s)
        self._open_until = now + max(self._cooldown_s, min(pause_s, most_s))
        self._probing = False

    def abandoned(self, probe: int) -> None:
        """The probe of that number was cancelled before it learnt anything: the next caller is the probe."""
        if self._is_out(probe):
            self._probing = False

    def _is_out(self, probe: int) -> bool:
        return self._probing and probe == self._probe
