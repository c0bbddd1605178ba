"""The trace of a run's steps, from all ranks.

Owns the choice of spans and the file's life. `trace` owns the format.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from accelerate.utils import gather_object

from salesrl_trl.ground.process import put_aside
from salesrl_trl.telemetry.timeline import StepTimes
from salesrl_trl.telemetry.trace import STEPS_TRACK, TraceWriter
from salesrl_trl.timing import Span

logger = logging.getLogger(__name__)


class StepTrace:
    """Spans of the traced steps. Every rank has one; the main rank writes the file.

    Args:
        path (`Path`):
            The file. The file of an earlier start gets another name.
        steps (`range`):
            Numbers of the traced steps. Empty for no trace.
        max_bytes (`int`):
            Largest size of the file.
        warn (`Callable[[str], None]`):
            Logs a warning, each text once.
    """

    def __init__(self, path: Path, steps: range, max_bytes: int, warn: Callable[[str], None]) -> None:
        self._path = path
        self._traced = steps
        self._max_bytes = max_bytes
        self._warn = warn
        self._others: list[Span] = []  # of batches of the traced steps
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
        self._others.clear()

    def add(self, step: int, spans: Sequence[Span]) -> None:
        """Keep spans of other threads, if `step` is traced."""
        if step in self._traced:
            self._others += spans

    def write(self, rank: int, last_step: int, steps: Sequence[StepTimes], spans: Sequence[Span]) -> None:
        """Gather the spans of traced steps on the main rank. A collective if there are traced steps, on all ranks
        alike.

        Args:
            rank (`int`):
                This rank.
            last_step (`int`):
                Number of the last of the steps.
            steps (`Sequence[StepTimes]`):
                The steps since the last call.
            spans (`Sequence[Span]`):
                The timeline's spans since the last call.
        """
        first = last_step - len(steps) + 1
        traced = [step for number, step in enumerate(steps, start=first) if number in self._traced]
        if not traced:
            return
        before = first == self._first_step + 1 and first in self._traced  # with the start-up
        chosen = [
            span
            for span in (*spans, *_step_spans(last_step, steps))
            if (before and span.ended <= steps[0].started)
            or any(step.started < span.ended <= step.ended for step in traced)
        ]
        chosen += self._others
        self._others = []
        everywhere = gather_object([(rank, self._clock_offset, chosen)])
        if self._is_written:
            self._write(everywhere)

    def close(
        self, last_step: int, steps: Sequence[StepTimes], cut_off: StepTimes | None, spans: Sequence[Span]
    ) -> None:
        """Write the main rank's last spans, with the step that was cut off, and close the file; no collective."""
        if self._is_written and (self._writer is not None or cut_off is not None):
            ended = [*steps, *([cut_off] if cut_off else [])]
            self._write([(0, self._clock_offset, [*spans, *self._others, *_step_spans(last_step, ended)])])
        self._end()

    def _write(self, everywhere: Sequence[tuple[int, float, Sequence[Span]]]) -> None:
        """Write spans, each list with its rank and the offset of its clock. A full disk ends the trace, not the
        run."""
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
            self._end()
            return
        if self._writer.full:
            self._warn(
                f"{self._path} is full at {self._max_bytes / 1e6:.0f} MB: later spans are left out "
                "(`trace_steps` chooses others)"
            )

    def _end(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer, self._is_written = None, False


def _step_spans(last_step: int, steps: Sequence[StepTimes]) -> list[Span]:
    """A span for each step."""
    first = last_step - sum(step.complete for step in steps) + 1
    return [
        Span(
            name=f"step {number}", started=step.started, ended=step.ended, track=STEPS_TRACK, failed=not step.complete
        )
        for number, step in enumerate(steps, start=first)
    ]
