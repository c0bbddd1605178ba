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
DENIED_COOLDOWN_S = 60.0
"""Pause after a refused key or a used-up quota, which nobody mends in seconds."""


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

        closed --- FAILURES_TO_OPEN failures in a row, or a denial ---> open for a pause
        open   --- pause over, next caller ---> probing (that one caller)
        probing --- answered ---> closed;  failed ---> open for twice the pause

    An answer to a call that was sent before closes it too: it is proof of life.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._cooldown_s = COOLDOWN_S
        self._open_since = 0.0
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
        """Code of the refusal that opened it, where it was one: no use in waiting."""
        return self._denial

    def permit(self, now: float) -> Permit:
        """What a caller may do at the moment `now`, in seconds of any steady clock."""
        if self._open_until is None:
            return Permit.SEND
        if self._probing or now < self._open_until:
            return Permit.WAIT
        self._probing = True
        self._probe += 1
        return Permit.PROBE

    def open_for_s(self, now: float) -> float:
        """Seconds that it has been open, failed probes included; 0 while it is closed."""
        return now - self._open_since if self.is_open else 0.0

    def pause_left_s(self, now: float) -> float:
        """Seconds until a probe may go; 0 while one is out."""
        return 0.0 if self._open_until is None or self._probing else max(self._open_until - now, 0.0)

    def answered(self) -> None:
        """A call was answered, be it by an error that is about the call alone."""
        self._close()

    def failed(self, now: float, *, probe: int = 0) -> None:
        """A call failed in a way that says something about the endpoint; `probe` is its number where it was one. One
        that has been overtaken counts like any other call."""
        self._failures += 1
        if self._is_out(probe):
            self._cooldown_s = min(2 * self._cooldown_s, MAX_COOLDOWN_S)
            self._denial = None
        elif self.is_open or self._failures < FAILURES_TO_OPEN:
            return
        self._open(now, self._cooldown_s)

    def denied(self, now: float, code: str) -> None:
        """A call was refused for a reason that holds for every call."""
        self._denial = code
        self._open(now, DENIED_COOLDOWN_S)

    def abandoned(self, probe: int) -> None:
        """The probe of that number was cancelled before it learnt anything: the next caller is the probe."""
        if self._is_out(probe):
            self._probing = False

    def _is_out(self, probe: int) -> bool:
        return self._probing and probe == self._probe

    def _close(self) -> None:
        self._failures = 0
        self._cooldown_s = COOLDOWN_S
        self._open_until = None
        self._probing = False
        self._denial = None

    def _open(self, now: float, pause_s: float) -> None:
        if not self.is_open:
            self._open_since = now
        self._open_until = now + pause_s
        self._probing = False
