"""The run as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing. `instruments` calls `StepTrace`.

The file is a valid JSON array after every write, so that the trace of a run that was cut off can be read. Format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import errno
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from accelerate.utils import gather_object

from salesrl_trl.ground.process import put_aside
from salesrl_trl.telemetry.timeline import StepTimes
from salesrl_trl.timing import PHASES_TRACK, Span

logger = logging.getLogger(__name__)

REWARDS_PROCESS = 100_000  # number of the process with the tracks of a rank's rewards: this plus the rank
STEPS_TRACK = "steps"
_TAIL = b"\n]\n"


class TraceWriter:
    """Writes spans of all ranks into one file. Each rank is a process of the trace, with a track of phases and one of
    steps; a second process has tracks for each place in a batch of rewards. Spans beyond `max_bytes` are left out,
    with a note. `origin`: the time at which it begins, in seconds, on the scale that all ranks share."""

    def __init__(self, path: Path, max_bytes: int, origin: float) -> None:
        self._max_bytes = max_bytes
        self._origin = origin
        self._tracks: Counter[int] = Counter()  # by process
        self._places: dict[tuple[int, str], tuple[int, int]] = {}  # process and track of a rank's track
        self._names: dict[str, str] = {}
        self._between = b"\n"
        self.full = False  # whether spans were left out
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)
        self._file.write(b"[" + _TAIL)
        self.close = self._file.close  # close the file. It is complete after every write.

    def write(self, rank: int, spans: Iterable[Span], clock_offset: float = 0.0) -> None:
        """Add a rank's spans, in any order. `clock_offset` is added to its `time.perf_counter`, for the shared scale.
        Raises `OSError` if the file can't be written; its content is as before."""
        events: list[str] = []
        for span in spans:
            process, track = self._places.get((rank, span.track)) or self._new_place(rank, span.track, events)
            name = self._names.get(span.name) or self._names.setdefault(span.name, _json(span.name))
            started, seconds = span.started + clock_offset - self._origin, span.seconds
            failed = ',"cname":"terrible","args":{"failed":true}' if span.failed else ""
            # without json.dumps, which takes five times as long: a step has hundreds of spans
            events.append(
                f'{{"name":{name},"ph":"X","pid":{process},"tid":{track},"ts":{started * 1e6:.1f},'
                f'"dur":{seconds * 1e6:.1f}{failed}}}'
            )
        if self.full or not events:
            return
        position = self._file.tell() - len(_TAIL)
        content = self._between + ",\n".join(events).encode(errors="replace")
        if position + len(content) > self._max_bytes:
            self.full = True
            content = self._between + _FULL.encode()
        self._file.seek(position)
        try:
            if self._file.write(content + _TAIL) != len(content) + len(_TAIL):
                raise OSError(errno.ENOSPC, "no space left for the trace")
        except OSError:
            self._file.seek(position)
            self._file.write(_TAIL)
            self._file.truncate()
            raise
        self._between = b",\n"

    def _new_place(self, rank: int, track: str, events: list[str]) -> tuple[int, int]:
        """The process and the track of a rank's new track, which are named in `events`."""
        process = rank if track in (PHASES_TRACK, STEPS_TRACK) else REWARDS_PROCESS + rank
        number = self._tracks[process]
        self._tracks[process] += 1
        if number == 0:
            title = f"rank {rank}" if process == rank else f"rank {rank}: rewards and other threads"
            events.append(_about("process_name", process, 0, name=title))
            events.append(_about("process_sort_index", process, 0, sort_index=process))
        events.append(_about("thread_name", process, number, name=track))
        events.append(_about("thread_sort_index", process, number, sort_index=number))
        self._places[rank, track] = process, number
        return process, number


_FULL = '{"name":"the trace is full","ph":"i","s":"g","pid":0,"tid":0,"ts":0}'


def _about(event: str, process: int, track: int, **arguments: str | int) -> str:
    return _json({"name": event, "ph": "M", "pid": process, "tid": track, "args": arguments})


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class StepTrace:
    """Spans of the traced steps, whose numbers are in `steps`. Every rank has one; the main rank writes the file. The
    file of an earlier start gets another name. `warn` logs each text once."""

    def __init__(self, path: Path, steps: range, max_bytes: int, warn: Callable[[str], None]) -> None:
        self._path = path
        self._traced = steps
        self._max_bytes = max_bytes
        self._warn = warn
        self._background_spans: list[Span] = []  # of batches of the traced steps
        self._writer: TraceWriter | None = None
        self._is_written = False  # by this rank
        self._clock_offset = time.time() - time.perf_counter()  # to the time of day, which machines share
        self._first_step = 0

    def start(self) -> None:
        """Let this rank write the file. Called on the main rank."""
        self._is_written = bool(self._traced)

    def begin_training(self, step: int) -> None:
        """Begin training after `step` optimizer steps. Spans of an earlier training are dropped."""
        self._first_step = step
        self._background_spans.clear()
        if self._writer is not None and not self._path.exists():  # it was moved with its run
            self._writer.close()
            self._writer = None

    def add(self, step: int, spans: Sequence[Span]) -> None:
        """Keep spans of other threads, if `step` is traced."""
        if step in self._traced:
            self._background_spans += spans

    def write(self, rank: int, last_step: int, steps: Sequence[StepTimes], spans: Sequence[Span]) -> None:
        """Gather the spans of traced steps on the main rank. A collective if there are traced steps, on all ranks
        alike. `steps` and `spans` are the timeline's since the last call, and `last_step` is the last of them."""
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
        """Write the main rank's last spans, with the step that was cut off, and close the file; no collective."""
        if self._is_written and (self._writer is not None or cut_off is not None):
            ended = [*steps, *([cut_off] if cut_off else [])]
            self._write([(0, self._clock_offset, [*spans, *self._background_spans, *_step_spans(last_step, ended)])])
        self._close_file()

    def _write(self, everywhere: Sequence[tuple[int, float, Sequence[Span]]]) -> None:
        """Write spans, each list with its rank and its clock's offset. A full disk ends the trace, not the run."""
        starts = [span.started + offset for _, offset, spans in everywhere for span in spans]
        if not starts:
            return
        try:
            if self._writer is None:
                put_aside(self._path)
                self._writer = TraceWriter(self._path, self._max_bytes, origin=min(starts))
            for rank, offset, spans in everywhere:
                self._writer.write(rank, spans, offset)
        except OSError as error:
            logger.warning(f"the trace ends here: {self._path} can't be written ({type(error).__name__})")
            self._close_file()
            return
        if self._writer.full:
            self._warn(
                f"{self._path} is full at {self._max_bytes / 1e6:.0f} MB: later spans are left out "
                "(`trace_steps` chooses others)"
            )

    def _close_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer, self._is_written = None, False


def _step_spans(last_step: int, steps: Sequence[StepTimes]) -> list[Span]:
    first = last_step - sum(step.complete for step in steps) + 1
    return [
        Span(
            name=f"step {number}", started=step.started, ended=step.ended, track=STEPS_TRACK, failed=not step.complete
        )
        for number, step in enumerate(steps, start=first)
    ]
