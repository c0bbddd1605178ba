"""Timing of blocks, functions and coroutines; `telemetry.timeline` covers the phases of a step. Standard library
only."""

import functools
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

PHASES_TRACK = "phases"
"""Trace track for the main thread's phases. Other threads' spans use their own tracks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A finished interval: `Span(name="judge", started=12.0, ended=15.2, track="reward 3")`."""

    name: str
    started: float  # seconds on `time.perf_counter`'s scale
    ended: float  # the same scale; not before `started`
    track: str = PHASES_TRACK
    """The trace row it is drawn on. Spans on one track are sequential or nested."""
    failed: bool = False  # whether it ended in an exception or was cut off

    @property
    def seconds(self) -> float:
        return self.ended - self.started


def overlap(first: tuple[float, float], other: tuple[float, float]) -> float:
    """Seconds of overlap between two intervals (started, ended)."""
    return max(0.0, min(first[1], other[1]) - max(first[0], other[0]))


@dataclass(eq=False, slots=True)
class Timing:
    """One execution of a timed block. `cost_time` can be read inside the block, after it, and after an exception."""

    name: str
    started: float
    ended: float | None = None
    failed: bool = False

    @property
    def cost_time(self) -> float:
        """Seconds from the block's start to its end, or until now."""
        return (time.perf_counter() if self.ended is None else self.ended) - self.started


_open: ContextVar[tuple[tuple["TimingContext", Timing], ...]] = ContextVar("timings_under_way", default=())


class Spans(Protocol):
    """Collects spans from any thread."""

    def add(self, spans: Iterable[Span]) -> None: ...


class TimingContext:
    """Times a block, a function or a coroutine function.

    Each entry has its own `Timing`, so a context may be re-entered, also concurrently by threads and tasks. Exceptions
    propagate.

    Example:
    ```python
    with TimingContext("rerank") as timing:
        ...
    print(timing.cost_time)


    @TimingContext("fetch")
    async def fetch(): ...
    ```

    Args:
        name (`str`, *optional*):
            Name of the timed work. Defaults to the decorated function's name, or the code location: `"prepare.py:42"`.
        timeline (`Spans`, *optional*):
            Receives a span for each entry, on its thread's track, e.g. a `telemetry.timeline.Timeline`.
        log (`Callable[[str], object]`, *optional*):
            Receives a line at the end of each entry, `"[Timing] rerank: 1.204 s"`: e.g. `logger.info` or `print`.
    """

    def __init__(
        self, name: str | None = None, timeline: Spans | None = None, log: Callable[[str], object] | None = None
    ) -> None:
        self._is_named = name is not None
        caller = sys._getframe(1)
        self.name = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}" if name is None else name
        self._timeline = timeline
        self._log = log
        self._latest: Timing | None = None

    @property
    def cost_time(self) -> float:
        """Seconds of the latest entry; 0 before the first."""
        return 0.0 if self._latest is None else self._latest.cost_time

    def __enter__(self) -> Timing:
        under_way = _open.get()
        timing = self._latest = Timing(self.name, time.perf_counter())
        _open.set((*under_way, (self, timing)))
        return timing

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        ended, under_way = time.perf_counter(), _open.get()
        # A generator may leave its block in a different context than it entered; then the latest entry is used.
        # Interleaved generators need a context each.
        mine = next((entry for entry in reversed(under_way) if entry[0] is self), None)
        _open.set(tuple(entry for entry in under_way if entry is not mine))
        timing = self._latest if mine is None else mine[1]
        assert timing is not None  # it was entered
        timing.ended, timing.failed = ended, kind is not None
        if self._log is not None:
            self._log(f"[Timing] {self.name}: {timing.cost_time:.3f} s{', failed' * timing.failed}")
        if self._timeline is not None:
            track = threading.current_thread().name
            span = Span(name=self.name, started=timing.started, ended=ended, track=track, failed=timing.failed)
            self._timeline.add([span])

    async def __aenter__(self) -> Timing:
        return self.__enter__()

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{function.__qualname__} is a generator, so timing the call measures nothing. Expected a function or "
                "a coroutine function. Use the context inside it."
            )
        if not self._is_named:
            self.name = function.__qualname__
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def timed_coroutine(*args: P.args, **kwargs: P.kwargs) -> object:
                with self:
                    return await function(*args, **kwargs)

            return timed_coroutine  # type: ignore[return-value]

        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return timed
