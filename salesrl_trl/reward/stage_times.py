"""The times of the stages of one completion: of those that ended, and of those under way.

Owns times alone. `stage` is the seam for a stage of one's own, `chain` owns their order, `batch` reports the times.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from salesrl_trl.names import Stage
from salesrl_trl.service.event_loop import told_to
from salesrl_trl.telemetry.completion_record import CompletionRecord
from salesrl_trl.timing import Span

T = TypeVar("T")


class StageTimes:
    """Times the stages of one completion. `track` is the line of the trace on which they are drawn."""

    def __init__(self, track: str) -> None:
        self.seconds: dict[str, float] = {}
        self.spans: list[Span] = []
        self.track = track
        self.completion_record: CompletionRecord | None = None
        self._open: dict[str, float] = {}
        self._waits_for: list[Callable[[], str]] = []
        self._elsewhere: dict[int, tuple[list[str], list[Span]]] = {}

    @property
    def own_record(self) -> CompletionRecord:
        """The record of the completion, which begins where it is first asked for."""
        self.completion_record = self.completion_record or CompletionRecord()
        return self.completion_record

    @property
    def under_way(self) -> list[str]:
        """The stages under way; where a call waits for a limit, that limit. From any thread."""
        here = [f"line for {limit()}" for limit in list(self._waits_for)] or [*self._open]
        return [*here, *(stage for stages, _ in list(self._elsewhere.values()) for stage in stages)]

    async def timed(self, call: Awaitable[T], stage: str) -> T:
        """Await `call` as a stage."""
        failed, started = True, time.perf_counter()
        self._open[stage] = started
        try:
            with told_to(self._waits_for):
                result = await call
            failed = False
            return result
        finally:
            self._open.pop(stage, None)  # another function of this name may have ended before
            self.record(stage, started, failed)

    def record(self, stage: str, started: float, failed: bool = False) -> None:
        """A stage that began at `started` is over now."""
        span = self._span(stage, started, failed)
        self.seconds[stage] = span.seconds
        self.spans.append(span)

    def show(self, call: int, under_way: list[str], spans: list[Span]) -> None:
        """What another process has reported of a call so far, in place of what it reported before."""
        self._elsewhere[call] = (under_way, spans)

    def adopt(self, call: int, spans: Sequence[Span] = (), record: CompletionRecord | None = None) -> None:
        """A call in another process is over: its stages and notes, if it could report them."""
        self._elsewhere.pop(call, None)
        if record is not None:
            self.own_record.add(record)
        self.spans.extend(spans)
        self.seconds.update({span.name: span.seconds for span in spans})

    def so_far(self) -> list[Span]:
        """The stages so far. One that is under way counts as failed. From any thread."""
        open_here = [self._span(stage, started, True) for stage, started in list(self._open.items())]
        elsewhere = [span for _, spans in list(self._elsewhere.values()) for span in spans]
        return [*self.spans, *open_here, *elsewhere]

    def _span(self, stage: str, started: float, failed: bool) -> Span:
        track = f"{self.track} reference" if stage == Stage.RAG_32B else self.track
        return Span(name=stage, started=started, ended=time.perf_counter(), track=track, failed=failed)
