"""Writes the run as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing. `instruments` calls `StepTrace`.

The file is a JSON array whose closing bracket is optional, so the trace of an interrupted run is readable. Format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from accelerate.utils import gather_object

from salesrl_trl.ground.process import put_aside
from salesrl_trl.telemetry.logs import warn_once
from salesrl_trl.telemetry.timeline import StepTimes
from salesrl_trl.timing import PHASES_TRACK, Span

logger = logging.getLogger(__name__)

REWARDS_PROCESS = 100_000  # a rank's reward tracks belong to the process with this id plus the rank
STEPS_TRACK = "steps"


class StepTrace:
    """Spans of the traced `steps`. Every rank has one; the main rank writes the file, which is limited to `max_bytes`.
    An existing file is renamed."""

    def __init__(self, path: Path, steps: range, max_bytes: int) -> None:
        self._path = path
        self._traced = steps
        self._max_bytes = max_bytes
        self._background_spans: list[Span] = []  # of the traced steps' batches
        self._origin: float | None = None  # start of the file, on the clock shared by all ranks
        self._tracks: dict[int, list[str]] = {}  # by process
        self._is_written = False  # by this rank
        self._clock_offset = time.time() - time.perf_counter()  # to the time of day, shared by all machines
        self._first_step = 0

    def start(self) -> None:
        """Make this rank write the file. Called on the main rank."""
        self._is_written = bool(self._traced)

    def begin_training(self, step: int) -> None:
        """Begin training after `step` optimizer steps. Drops spans of an earlier training."""
        self._first_step = step
        self._background_spans.clear()
        if not self._path.exists():  # the run was moved
            self._origin = None

    def add(self, step: int, spans: Sequence[Span]) -> None:
        """Add spans of other threads if `step` is traced."""
        if step in self._traced:
            self._background_spans += spans

    def write(self, rank: int, last_step: int, steps: Sequence[StepTimes], spans: Sequence[Span]) -> None:
        """Gather the spans of traced steps on the main rank. A collective whenever `steps` include traced ones, which
        holds for all ranks or none. `steps`, up to `last_step`, and `spans` are the timeline's since the last call."""
        first = last_step - len(steps) + 1
        traced = [step for number, step in enumerate(steps, start=first) if number in self._traced]
        if not traced:
            return
        includes_start_up = first == self._first_step + 1 and first in self._traced
        chosen = [
            span
            for span in (*spans, *_step_spans(last_step, steps))
            if (includes_start_up and span.ended <= steps[0].started)
            or any(step.started < span.ended <= step.ended for step in traced)
        ]
        chosen += self._background_spans
        self._background_spans = []
        everywhere = gather_object([(rank, self._clock_offset, chosen)])
        if self._is_written:
            self._write(everywhere)

    def close(
        self, last_step: int, steps: Sequence[StepTimes], cut_off: StepTimes | None, spans: Sequence[Span]
    ) -> None:
        """Write the main rank's last spans, including the interrupted step, and close the file; not a collective."""
        if self._is_written and (self._origin is not None or cut_off is not None):
            ended = [*steps, *([cut_off] if cut_off else [])]
            self._write([(0, self._clock_offset, [*spans, *self._background_spans, *_step_spans(last_step, ended)])])
        if self._origin is not None:
            with contextlib.suppress(OSError), self._path.open("a") as file:
                file.write("\n]\n")
        self._origin, self._is_written = None, False

    def _write(self, everywhere: Sequence[tuple[int, float, Sequence[Span]]]) -> None:
        """Write lists of spans with their rank and clock offset. A full disk ends the trace, not the run."""
        starts = [span.started + offset for _, offset, spans in everywhere for span in spans]
        if not starts:
            return
        size = 0
        try:
            if self._origin is None:
                put_aside(self._path)
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text("[", encoding="utf-8")
                self._origin, self._tracks = min(starts), {}
            size = self._path.stat().st_size
            self._append([event for each in everywhere for event in self._events(self._origin, *each)], size)
        except OSError as error:
            logger.warning(f"the trace ends here: {self._path} can't be written ({type(error).__name__})")
            self._is_written = False
            with contextlib.suppress(OSError):
                os.truncate(self._path, size)

    def _events(self, origin: float, rank: int, offset: float, spans: Sequence[Span]) -> Iterator[dict[str, object]]:
        for span in spans:
            process = rank if span.track in (PHASES_TRACK, STEPS_TRACK) else REWARDS_PROCESS + rank
            tracks = self._tracks.setdefault(process, [])
            about = {"ph": "M", "pid": process, "tid": len(tracks)}
            if not tracks:
                title = f"rank {rank}" if process == rank else f"rank {rank}: rewards and other threads"
                yield {"name": "process_name", **about, "args": {"name": title}}
            if span.track not in tracks:
                tracks.append(span.track)
                yield {"name": "thread_name", **about, "args": {"name": span.track}}
            times = {"ts": 1e6 * (span.started + offset - origin), "dur": 1e6 * span.seconds}
            failed = {"cname": "terrible", "args": {"failed": True}} if span.failed else {}
            yield {"name": span.name, "ph": "X", "pid": process, "tid": tracks.index(span.track), **times, **failed}

    def _append(self, events: Sequence[dict[str, object]], size: int) -> None:
        lines = [json.dumps(event, ensure_ascii=False, separators=(",", ":")) for event in events]
        content = (",\n" if size > 1 else "\n") + ",\n".join(lines)
        if size + len(content) + 3 > self._max_bytes:  # including the closing bracket
            most = f"{self._max_bytes / 1e6:.0f} MB"
            warn_once(f"{self._path} reached {most}: later spans are dropped (`trace_steps` selects other steps)")
            self._is_written = False
            return
        with self._path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(content)


def _step_spans(last_step: int, steps: Sequence[StepTimes]) -> list[Span]:
    first = last_step - sum(step.complete for step in steps) + 1
    return [
        Span(
            name=f"step {number}", started=step.started, ended=step.ended, track=STEPS_TRACK, failed=not step.complete
        )
        for number, step in enumerate(steps, start=first)
    ]
