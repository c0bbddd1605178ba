"""Where time goes: timings of pieces of code, and phases of a step that add up to its wall time.

Owns the arithmetic of time. Knows neither a model nor what the phases mean; where work runs behind the host, on a GPU,
a clock that is handed in says when the device reached a mark. Standard library only.

A step is cut at marks, one wherever a phase begins or ends; the stretch between two marks belongs to the phase that
was innermost there, or to nobody (`UNACCOUNTED`). So the parts of a step sum to its wall time by construction, and
what was forgotten shows up as unaccounted instead of getting lost.
"""

import functools
import inspect
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

UNACCOUNTED = "unaccounted"
"""The part of a step in which no phase was open."""
PHASES_TRACK = "phases"
"""Where a timeline's phases lie in a trace, beside the tracks of other threads' spans."""
MAX_STEPS_PENDING = 8
"""Finished steps that wait for `take`; then those the device is done with are settled, so that marks don't pile up."""
MAX_STEPS_KEPT = 10_000
"""Settled steps that nobody takes, for example where nothing is logged; the oldest are dropped beyond it."""
MAX_SPANS_PENDING = 100_000
"""Spans that nobody takes; the oldest are dropped beyond it, and counted. A step has some dozens, and four for each
completion where rewards are traced."""
CLOSE_PATIENCE_S = 5.0
"""What a device is given at the end to be done. One that hangs or has failed is left: then the host's times count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that began and ended: `Span(name="judge", started=12.0, ended=15.2, track="reward 3")`."""

    name: str
    """What it was."""
    started: float
    """Seconds on `time.perf_counter`'s scale."""
    ended: float
    """The same; not before `started`."""
    track: str = PHASES_TRACK
    """Where it is drawn. Spans of one track follow or enclose each other."""
    failed: bool = False
    """Whether it ended by an exception, or was cut off."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.started


def overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Seconds that lie in both of two intervals (started, ended)."""
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


class Timing:
    """One run of a timed block. `cost_time` may be read inside the block, after it, and when the block raised."""

    __slots__ = ("ended", "failed", "name", "path", "started")

    def __init__(self, name: str, outer: "Timing | None" = None) -> None:
        self.name = name
        self.path: tuple[str, ...] = (*(outer.path if outer else ()), name)
        """Names of the blocks this one lies in, its own last."""
        self.failed = False
        self.ended: float | None = None
        self.started = time.perf_counter()

    @property
    def cost_time(self) -> float:
        """Seconds from the block's start to its end, or until now."""
        return (time.perf_counter() if self.ended is None else self.ended) - self.started


_open: ContextVar[tuple[tuple["TimingContext", Timing], ...]] = ContextVar("timings_under_way", default=())


class TimingContext:
    """Times a block, a function or a coroutine function.

    Each entry is a `Timing` of its own, so that one context may be entered again inside itself, and by many threads
    and tasks at once. Exceptions pass through.

    Example:
    ```python
    with TimingContext("rerank") as timing:
        ...
    print(timing.cost_time)


    @TimingContext("fetch")
    async def fetch(): ...
    ```

    Args:
        name (`str`):
            What is timed.
        timeline (`Timeline`, *optional*):
            Gets a span of each entry, on the track of its thread.
    """

    def __init__(self, name: str, timeline: "Timeline | None" = None) -> None:
        self.name = name
        self._timeline = timeline
        self._latest: Timing | None = None

    @property
    def cost_time(self) -> float:
        """Of the latest entry; 0 before the first."""
        return 0.0 if self._latest is None else self._latest.cost_time

    def __enter__(self) -> Timing:
        under_way = _open.get()
        timing = self._latest = Timing(self.name, under_way[-1][1] if under_way else None)
        _open.set((*under_way, (self, timing)))
        return timing

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = time.perf_counter()
        under_way = _open.get()
        mine = [index for index, (owner, _) in enumerate(under_way) if owner is self]
        # A generator's block may be left in another context than it was entered in: then it is the latest. Generators
        # that take turns want a context each.
        timing = under_way[mine[-1]][1] if mine else self._latest
        if mine:
            _open.set(under_way[: mine[-1]] + under_way[mine[-1] + 1 :])
        if timing is None:
            raise RuntimeError(f"TimingContext({self.name!r}) was left without having been entered")
        timing.ended, timing.failed = ended, kind is not None
        if self._timeline is not None:
            track = threading.current_thread().name
            self._timeline.add(
                [Span(name=self.name, started=timing.started, ended=ended, track=track, failed=timing.failed)]
            )

    async def __aenter__(self) -> Timing:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: F) -> F:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{function.__qualname__} is a generator: calling it takes no time. Expected a function or a "
                "coroutine function. Use the context inside it."
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def timed_coroutine(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

            return timed_coroutine  # type: ignore[return-value]

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return timed  # type: ignore[return-value]


class Mark:
    """A moment in the host's program, and, once it is settled, when the work issued before it was done."""

    __slots__ = ("event", "host", "time")

    def __init__(self, event: Any = None) -> None:
        self.event = event
        self.time: float | None = None
        self.host = time.perf_counter()


class Clock(Protocol):
    """Says when marks were reached."""

    def mark(self) -> Mark:
        """The present moment. Never waits."""

    def settle(self, marks: Sequence[Mark]) -> None:
        """Give each of the marks, which come in the order they were made, its `time` on `time.perf_counter`'s scale,
        never falling. Waits for the last one."""

    def is_reached(self, mark: Mark) -> bool:
        """Whether `settle` would not have to wait for it."""


class HostClock:
    """Where work is done when the call returns: a CPU."""

    def mark(self) -> Mark:
        return Mark()

    def settle(self, marks: Sequence[Mark]) -> None:
        for mark in marks:
            mark.time = mark.host

    def is_reached(self, mark: Mark) -> bool:
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """A finished step: `StepTimes(started=3.0, ended=4.0, seconds={"forward": 0.6, "unaccounted": 0.4})`."""

    started: float
    """Seconds on `time.perf_counter`'s scale, when the device was done with all before the step."""
    ended: float
    """The same for all of the step."""
    seconds: dict[str, float]
    """By phase, `UNACCOUNTED` included: they sum to `wall`."""
    complete: bool = True
    """False for one that was cut off by the run's end."""

    @property
    def wall(self) -> float:
        """Seconds from start to end."""
        return self.ended - self.started


class _OpenPhase:
    __slots__ = ("mark", "timing")

    def __init__(self, timing: Timing, mark: Mark) -> None:
        self.timing = timing
        self.mark = mark


class _Step:
    """Marks of a step, and to whom each stretch behind a mark belongs."""

    def __init__(self, first: Mark, owner: str) -> None:
        self.marks = [first]
        self.owners = [owner]

    def times(self, complete: bool = True) -> StepTimes:
        """Once all marks are settled."""
        seconds: dict[str, float] = {}
        moments = [mark.time or 0.0 for mark in self.marks]
        for owner, started, ended in zip(self.owners[:-1], moments[:-1], moments[1:], strict=True):
            seconds[owner] = seconds.get(owner, 0.0) + ended - started
        return StepTimes(started=moments[0], ended=moments[-1], seconds=seconds, complete=complete)


class Timeline:
    """Phases of steps on one thread, and spans of others.

    Args:
        clock (`Clock`, *optional*):
            When marks were reached. The host's own where not given.
        opaque (`Iterable[str]`, *optional*):
            Phases to which all that lies inside them belongs: an evaluation generates and scores too, but that is
            evaluation.

    `enabled` may be turned off and on between steps; while it is off, nothing is marked and no step is counted.
    """

    def __init__(self, clock: Clock | None = None, opaque: Iterable[str] = ()) -> None:
        self.enabled = True
        self._clock: Clock = clock or HostClock()
        self._opaque = frozenset(opaque)
        self._thread = threading.get_ident()
        self._stack: tuple[_OpenPhase, ...] = ()
        self._step: _Step | None = None
        self._cut_at = 0.0
        self._finished: list[_Step] = []
        self._taken: deque[StepTimes] = deque(maxlen=MAX_STEPS_KEPT)
        self._closed_phases: list[tuple[str, Mark, Mark, bool]] = []  # of which a mark is not settled yet
        self._spans: deque[Span] = deque()
        self.dropped_spans = 0
        """Spans that were dropped because nobody took them."""

    @property
    def current(self) -> tuple[str, float] | None:
        """The innermost open phase, or the opaque one it lies in, and the seconds since it began on the host;
        `UNACCOUNTED` and the seconds since the last one ended where a step has none. From any thread."""
        stack = self._stack
        if not stack:
            return None if self._step is None else (UNACCOUNTED, time.perf_counter() - self._cut_at)
        shown = self._shown(stack)
        return shown.timing.name, shown.timing.cost_time

    @contextmanager
    def phase(self, name: str) -> Iterator[Timing]:
        """Time a block as a phase. On another thread than the timeline's it is a span on that thread's track."""
        if not self.enabled:
            yield Timing(name)
            return
        if threading.get_ident() != self._thread:
            with TimingContext(name, self) as timing:
                yield timing
            return
        phase = self._open(name)
        try:
            yield phase.timing
        except BaseException:
            phase.timing.failed = True
            raise
        finally:
            self._close(phase)

    def begin(self, name: str) -> None:
        """Open a phase whose end lies in another function: `end` it there. `starts` and `close` end it too."""
        if self.enabled and threading.get_ident() == self._thread:
            self._open(name)

    def end(self, name: str) -> None:
        """Close the phase if it is open, and what was left open inside it."""
        phase = next((each for each in reversed(self._stack) if each.timing.name == name), None)
        if phase is not None:
            self._close(phase)

    def starts(self) -> None:
        """The first step begins now, on this thread. What is left of an earlier run's steps is dropped."""
        self._thread = threading.get_ident()
        self._stack = ()
        self._finished.clear()
        self._taken.clear()
        self._cut_at = time.perf_counter()
        self._step = _Step(self._clock.mark(), UNACCOUNTED) if self.enabled else None

    def stops(self) -> None:
        """There are no more steps. Phases go on being kept."""
        self._step = None

    def step_ends(self) -> None:
        """A step ends and the next one begins."""
        if not self.enabled:
            self._step = None
            return
        mark = self._clock.mark()
        if self._step is not None:
            self._step.marks.append(mark)
            self._step.owners.append(UNACCOUNTED)
            self._finished.append(self._step)
        self._step = _Step(mark, self._owner())
        if len(self._finished) > MAX_STEPS_PENDING and self._clock.is_reached(self._finished[-2].marks[-1]):
            self._settle(self._finished[:-1])

    def add(self, spans: Iterable[Span]) -> None:
        """Keep spans that were measured elsewhere; from any thread."""
        self._spans.extend(spans)
        while len(self._spans) > MAX_SPANS_PENDING:
            self._spans.popleft()
            self.dropped_spans += 1

    def take(self) -> list[StepTimes]:
        """The steps that ended since the last time. Waits until the device is done with them."""
        self._settle(self._finished)
        taken = list(self._taken)
        self._taken.clear()
        return taken

    def take_spans(self) -> list[Span]:
        """What ended since the last time: phases as far as they are settled, and spans of others."""
        spans = []
        while self._spans:
            spans.append(self._spans.popleft())
        return spans

    def close(self) -> StepTimes | None:
        """End what is open, as failed, and settle everything; a device that does not answer is not waited for longer
        than `CLOSE_PATIENCE_S`. Returns the step that was cut off, if there was one."""
        while self._stack:
            self._stack[-1].timing.failed = True
            self._close(self._stack[-1])
        last = self._step
        end = self._clock.mark()
        if not self._is_reached_soon(end):
            self._clock = HostClock()
        self._settle(self._finished)
        if last is not None:
            last.marks.append(end)
            last.owners.append(UNACCOUNTED)
            self._settle_marks(last.marks, end.host)
        self._step = None
        self._settle([])
        return last.times(complete=False) if last is not None and len(last.marks) > 1 else None

    def _is_reached_soon(self, mark: Mark) -> bool:
        patience_ends = time.monotonic() + CLOSE_PATIENCE_S
        while not self._clock.is_reached(mark):
            if time.monotonic() > patience_ends:
                return False
            time.sleep(0.01)
        return True

    def _open(self, name: str) -> _OpenPhase:
        mark = self._clock.mark()
        phase = _OpenPhase(Timing(name, self._stack[-1].timing if self._stack else None), mark)
        self._stack = (*self._stack, phase)
        self._cut(mark)
        return phase

    def _close(self, phase: _OpenPhase) -> None:
        if phase not in self._stack:
            return
        mark = self._clock.mark()
        index = self._stack.index(phase)
        for each in reversed(self._stack[index:]):
            each.timing.ended = mark.host
            each.timing.failed = each.timing.failed or phase.timing.failed
            self._closed_phases.append((each.timing.name, each.mark, mark, each.timing.failed))
        self._stack = self._stack[:index]
        self._cut(mark)

    def _cut(self, mark: Mark) -> None:
        self._cut_at = mark.host
        if self._step is not None:
            self._step.marks.append(mark)
            self._step.owners.append(self._owner())

    def _owner(self) -> str:
        return self._shown(self._stack).timing.name if self._stack else UNACCOUNTED

    def _shown(self, stack: tuple[_OpenPhase, ...]) -> _OpenPhase:
        return next((each for each in stack if each.timing.name in self._opaque), stack[-1])

    def _settle(self, steps: list[_Step]) -> None:
        for step in list(steps):
            self._settle_marks(step.marks, step.marks[-1].host)
            self._taken.append(step.times())
            self._finished.remove(step)
        if self._step is None:  # phases outside of any step
            self._settle_marks([], math.inf)

    def _settle_marks(self, marks: Sequence[Mark], until: float) -> None:
        """Settle marks, and those of phases that were closed before `until` by the host's clock."""
        phases = [mark for _, start, end, _ in self._closed_phases for mark in (start, end) if end.host <= until]
        waiting = {mark for mark in (*marks, *phases) if mark.time is None}
        if waiting:
            self._clock.settle(sorted(waiting, key=lambda mark: mark.host))
        still_open = []
        for name, start, end, failed in self._closed_phases:
            if start.time is None or end.time is None:
                still_open.append((name, start, end, failed))
            else:
                self.add([Span(name=name, started=start.time, ended=end.time, failed=failed)])
        self._closed_phases = still_open
