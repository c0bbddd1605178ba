"""What happens on the way of one completion: its action, answers, verdicts, and every request that is sent for it.
What runs on its behalf finds the record by the context, so calls need no further argument."""

import contextlib
import contextvars
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

QUEUE = "queue"  # name, among the seconds of stages, of the wait for a slot, which is inside of theirs
BEATEN = "another request was faster"  # the message with which a request is cancelled that is not needed any more


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One request: Unix time at which it was sent, seconds, code of its failure, empty for an answer.
    A cancelled one has the code `cancelled` if it was `BEATEN`, else `given_up`. `path` is that of HTTP; without it,
    `group` or `batch` where the request was for several completions, and `turn 2` where that of a conversation called
    a tool."""

    service: str
    path: str
    time: float
    seconds: float
    failure: str
    request: bytes
    answer: bytes | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What a judge said by one rubric: two scores, `None` without a verdict, and words or a failure's code. Or what a
    reward function said: its number, and why."""

    candidate: float | None = None
    reference: float | None = None
    reason: str = ""
    provider: str = ""


@dataclass(slots=True)
class CompletionRecord:
    """The notes of one completion. They are picklable, and belong to one event loop until it is scored."""

    action: dict[str, str] | None = None
    answer: object = None  # JSON value of the 8B endpoint's answer; `reference` of the 32B endpoint's
    reference: object = None
    verdicts: dict[str, Judged] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    queue_s: float = 0.0  # the longest wait of a call for a slot, in seconds

    @property
    def waits(self) -> dict[str, float]:
        """The longest wait for a slot, as a stage; nothing where no call had to wait."""
        return {QUEUE: self.queue_s} if self.queue_s > 0 else {}

    def add(self, other: "CompletionRecord") -> None:
        """Take in what another process noted."""
        self.action = other.action or self.action
        self.answer = other.answer or self.answer
        self.reference = other.reference or self.reference
        self.verdicts |= other.verdicts
        self.calls += other.calls
        self.queue_s = max(self.queue_s, other.queue_s)

    def drain_calls(self) -> list[Call]:
        calls, self.calls = self.calls, []
        return calls


_CURRENT: contextvars.ContextVar[CompletionRecord | None] = contextvars.ContextVar("completion_record", default=None)
_OUTER: "contextvars.ContextVar[CallNote | None]" = contextvars.ContextVar("call_note", default=None)


@contextlib.contextmanager
def noted_in(record: CompletionRecord | None) -> Iterator[None]:
    """Inside the block, calls of the running task and of tasks that it starts are noted here; with `None` nowhere."""
    token = _CURRENT.set(record)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def note_wait(seconds: float) -> None:
    """A call of the running task has waited so long for a slot."""
    if (record := _CURRENT.get()) is not None:
        record.queue_s = max(record.queue_s, seconds)


class CallNote:
    """Notes one request, when it is over: `with CallNote(service, path, request) as note: note.answer = ...`. One
    inside of another takes its place, unless that `stays`: a client knows more of a request than the transport that
    sends it."""

    def __init__(self, service: str, path: str = "", request: bytes | None = None, *, stays: bool = False) -> None:
        self._record = _CURRENT.get()
        self._service, self._path, self._request = service, path, request or b""
        self.answer: bytes | None = None
        self._has_inner, self._stays = False, stays

    def __enter__(self) -> "CallNote":
        if self._record is not None:
            if (outer := _OUTER.get()) is not None:
                outer._has_inner = True
            self._token = _OUTER.set(self)
            self._began, self._time = time.perf_counter(), time.time()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._record is None:
            return
        _OUTER.reset(self._token)
        if self._has_inner and not self._stays:
            return
        failure = "" if error is None else str(getattr(error, "code", "")) or type(error).__name__
        if failure == "CancelledError":
            failure = "cancelled" if BEATEN in getattr(error, "args", ()) else "given_up"
        self._record.calls.append(
            Call(
                service=self._service, path=self._path, time=self._time, seconds=time.perf_counter() - self._began,
                failure=failure, request=self._request, answer=self.answer,
            )
        )  # fmt: skip
