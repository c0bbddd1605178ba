"""The record of one completion: its action, answers, verdicts, and every request sent for it. Code that runs on its
behalf finds the record via the context, so calls need no extra argument."""

import contextlib
import contextvars
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

QUEUE = "queue"  # the stage name for queueing time, which other stages include
BEATEN = "another request was faster"  # cancellation message of a request made redundant by a hedge


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One request: the Unix time at which it was sent, its duration and its failure code, empty if it was answered. A
    cancelled request has the code `cancelled` if it was `BEATEN`, otherwise `given_up`. `path` is the HTTP path;
    without one, `group` or `batch` for requests covering several completions, or `turn 2` for a tool call in that
    turn."""

    service: str
    path: str
    time: float
    seconds: float
    failure: str
    request: bytes
    answer: bytes | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A judge's verdict on one rubric: two scores, `None` without a verdict, and a reason or failure code. Or a reward
    function's number and reason."""

    candidate: float | None = None
    reference: float | None = None
    reason: str = ""
    provider: str = ""


@dataclass(slots=True)
class CompletionRecord:
    """The record of one completion. Picklable; belongs to one event loop until the completion is scored."""

    action: dict[str, str] | None = None
    answer: object = None  # the 8B endpoint's answer as a JSON value; `reference` is the 32B endpoint's
    reference: object = None
    verdicts: dict[str, Judged] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    queue_s: float = 0.0  # longest queueing time of a call, in seconds

    def add(self, other: "CompletionRecord") -> None:
        """Merge a record from another process."""
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
    """Record calls of the running task, and of tasks it starts, in `record`; `None` disables recording."""
    token = _CURRENT.set(record)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def note_wait(seconds: float) -> None:
    """A call of the running task was queued for so many seconds."""
    if (record := _CURRENT.get()) is not None:
        record.queue_s = max(record.queue_s, seconds)


class CallNote:
    """Records one request when it ends: `with CallNote(service, path, request) as note: note.answer = ...`. A nested
    note replaces an outer one that does not `stay`: a client knows more about a request than its transport."""

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
