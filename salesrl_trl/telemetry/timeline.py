"""The phases of a step, which add up to its wall time: the time between two marks belongs to the innermost open phase,
or to `Phase.UNACCOUNTED`. A GPU lags behind the host, so a clock determines when the device reached each mark."""

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, ParamSpec, TypeVar

from salesrl_trl.names import Phase
from salesrl_trl.timing import Span, Timing, TimingContext

P = ParamSpec("P")
R = TypeVar("R")

MAX_STEPS_KEPT = 1_000
"""Maximum number of undrained steps, e.g. when nothing is logged. Beyond it, the oldest are dropped."""
MAX_SPANS_PENDING = 100_000
"""Maximum number of undrained spans. Beyond it, the oldest are dropped. A step has a few dozen spans, plus four per
completion while rewards are traced."""
CLOSE_PATIENCE_S = 5.0
"""Time for the device to finish its work at the end. If it hangs or has failed, the host's times are used."""


@dataclass(eq=False, slots=True)
class Mark:
    """A point in the host program. Once settled, `time` is when all work issued before it was done."""

    event: Any = None  # depends on the clock
    host: float = field(default_factory=time.perf_counter)
    time: float | None = None


class Clock:
    """Determines when marks were reached. This base class is for synchronous devices: a CPU."""

    def mark(self) -> Mark:
        """Mark the current point. Never waits."""
        return Mark()

    def settle(self, marks: Sequence[Mark]) -> None:
        """Set the `time` of each mark on the `time.perf_counter` clock. Waits for the last one. Marks are passed in
        creation order, and their times never decrease."""
        for mark in marks:
            mark.time = mark.host

    def is_reached(self, mark: Mark) -> bool:
        """Whether `settle` would return without waiting for it."""
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """A finished step: `StepTimes(started=3.0, ended=4.0, seconds={"forward": 0.6, "unaccounted": 0.4})`."""

    started: float
    """When the device had finished all earlier work: seconds on the `time.perf_counter` clock."""
    ended: float  # when the device had finished the step's work
    seconds: dict[str, float]  # by phase, including `UNACCOUNTED`; sums to `wall`
    complete: bool = True  # false if the end of the run cut the step off

    @property
    def wall(self) -> float:
        return self.ended - self.started


class _OpenPhase(NamedTuple):
    timing: Timing
    mark: Mark


class _Step:
    def __init__(self, first: Mark, owner: str) -> None:
        self.marks = [first]
        self.owners = [owner]

    def cut(self, mark: Mark, owner: str) -> None:
        """From this mark on, the time belongs to this owner."""
        self.marks.append(mark)
        self.owners.append(owner)

    def times(self, complete: bool = True) -> StepTimes:
        """The step's times. All marks must be settled."""
        seconds: dict[str, float] = {}
        moments = [mark.time or 0.0 for mark in self.marks]
        for owner, started, ended in zip(self.owners[:-1], moments[:-1], moments[1:], strict=True):
            seconds[owner] = seconds.get(owner, 0.0) + ended - started
        return StepTimes(started=moments[0], ended=moments[-1], seconds=seconds, complete=complete)


class Timeline:
    """Phases of steps on one thread, and spans of other threads. The phases in `opaque` own everything inside them: an
    evaluation generates and scores too, but all of this time counts as evaluation."""

    def __init__(self, clock: Clock | None = None, opaque: Iterable[str] = ()) -> None:
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS_PENDING)
        self._clock = clock or Clock()
        self._opaque = frozenset(opaque)
        self._thread = threading.get_ident()
        self._stack: tuple[_OpenPhase, ...] = ()
        self._owner: str = Phase.UNACCOUNTED  # of the time from now on
        self._step: _Step | None = None
        self._cut_at = 0.0
        self._finished: deque[_Step] = deque(maxlen=MAX_STEPS_KEPT)
        self._closed_phases: deque[tuple[str, Mark, Mark, bool]] = deque(maxlen=MAX_SPANS_PENDING)
        """Name, start, end, failed; not settled."""

    @property
    def current(self) -> tuple[str, float] | None:
        """The current phase and its host time so far, from any thread: the innermost open one, or the opaque phase
        around it. Between a step's phases, `UNACCOUNTED` and the time since the last one ended. Otherwise `None`."""
        stack = self._stack
        if not stack:
            return None if self._step is None else (Phase.UNACCOUNTED, time.perf_counter() - self._cut_at)
        timing = _shown(stack, self._opaque)
        return timing.name, timing.cost_time

    @contextmanager
    def phase(self, name: str) -> Iterator[Timing]:
        """Time a block as a phase. On other threads, the block becomes a span on the thread's own track."""
        timing = self.begin(name)
        if timing is None:
            with TimingContext(name, self) as elsewhere:
                yield elsewhere
            return
        try:
            yield timing
        except BaseException:
            timing.failed = True
            raise
        finally:
            self.end(timing)

    def begin(self, name: str) -> Timing | None:
        """Open a phase that is closed elsewhere by `end`, or by `starts` and `close`. `None` on other threads,
        where it measures nothing."""
        if threading.get_ident() != self._thread:
            return None
        mark = self._clock.mark()
        phase = _OpenPhase(Timing(name, time.perf_counter()), mark)
        self._cut(mark, (*self._stack, phase))
        return phase.timing

    def end(self, what: str | Timing) -> None:
        """Close a phase, by name or timing, with all phases inside it, if it is open."""
        open_ones = [place for place, phase in enumerate(self._stack) if what in (phase.timing.name, phase.timing)]
        if not open_ones:
            return
        mark, index = self._clock.mark(), open_ones[-1]
        for inner in reversed(self._stack[index:]):
            inner.timing.ended = mark.host
            inner.timing.failed = inner.timing.failed or self._stack[index].timing.failed
            self._closed_phases.append((inner.timing.name, inner.mark, mark, inner.timing.failed))
        self._cut(mark, self._stack[:index])

    def starts(self) -> None:
        """Begin the first step now, on this thread. Drops steps of an earlier run."""
        self._thread = threading.get_ident()
        self._stack, self._owner = (), Phase.UNACCOUNTED
        self._finished.clear()
        self._cut_at = time.perf_counter()
        self._step = _Step(self._clock.mark(), Phase.UNACCOUNTED)

    def stops(self) -> None:
        """Stop measuring steps. Phases are still recorded as spans."""
        self._step = None

    def step_ends(self) -> None:
        """End a step and begin the next one."""
        mark = self._clock.mark()
        if self._step is not None:
            self._step.cut(mark, Phase.UNACCOUNTED)
            self._finished.append(self._step)
        self._step = _Step(mark, self._owner)

    def add(self, spans: Iterable[Span]) -> None:
        """Add spans measured elsewhere. From any thread."""
        self._spans.extend(spans)

    def drain_spans(self) -> list[Span]:
        """The settled phases, and the spans of other threads, that ended since the last call."""
        return [self._spans.popleft() for _ in range(len(self._spans))]

    def drain_steps(self) -> list[StepTimes]:
        """The steps that ended since the last call. Waits until the device has finished them."""
        steps = []
        while self._finished:
            step = self._finished.popleft()
            self._settle_marks(step.marks, step.marks[-1].host)
            steps.append(step.times())
        if self._step is None:  # phases may occur outside of steps
            self._settle_marks([], math.inf)
        return steps

    def close(self) -> StepTimes | None:
        """End all open phases as failed, and settle everything. Waits at most `CLOSE_PATIENCE_S` for the device.
        Returns the interrupted step, if any."""
        if self._stack:
            self._stack[0].timing.failed = True
            self.end(self._stack[0].timing)
        last = self._step
        end = self._clock.mark()
        patience_ends = time.monotonic() + CLOSE_PATIENCE_S
        while not self._clock.is_reached(end):
            if time.monotonic() > patience_ends:
                self._clock = Clock()
                break
            time.sleep(0.01)
        if last is not None:
            last.cut(end, Phase.UNACCOUNTED)
            self._settle_marks(last.marks, end.host)
        self._step = None
        self._settle_marks([], math.inf)
        return last.times(complete=False) if last is not None and len(last.marks) > 1 else None

    def _cut(self, mark: Mark, stack: tuple[_OpenPhase, ...]) -> None:
        self._stack, self._cut_at = stack, mark.host
        self._owner = _shown(stack, self._opaque).name if stack else Phase.UNACCOUNTED
        if self._step is not None:
            self._step.cut(mark, self._owner)

    def _settle_marks(self, marks: Sequence[Mark], until: float) -> None:
        """Settle marks, including those of phases closed by `until`, and turn these phases into spans."""
        ended = []
        while self._closed_phases and self._closed_phases[0][2].host <= until:
            ended.append(self._closed_phases.popleft())
        waiting = {mark for mark in (*marks, *(mark for phase in ended for mark in phase[1:3])) if mark.time is None}
        if waiting:
            self._clock.settle(sorted(waiting, key=attrgetter("host")))
        for name, start, end, failed in ended:
            self.add([Span(name=name, started=start.time or 0.0, ended=end.time or 0.0, failed=failed)])


def _shown(stack: tuple[_OpenPhase, ...], opaque: frozenset[str]) -> Timing:
    """The innermost phase, or the opaque one around it."""
    return next((phase.timing for phase in stack if phase.timing.name in opaque), stack[-1].timing)


def phased(timeline: Timeline, name: str, function: Callable[P, R]) -> Callable[P, R]:
    """Wrap `function` so that each call is timed as a phase."""

    @functools.wraps(function)
    def timed(*args: P.args, **kwargs: P.kwargs) -> R:
        with timeline.phase(name):
            return function(*args, **kwargs)

    return timed
