"""Everything that is measured while a run goes on, and where it goes.

Owns the timeline, what was trained on, the trace and the heartbeat, and brings the ranks' sums together. The names and
the arithmetic of the figures are `perf`'s; the trainer says what happens when.
"""

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather, gather_object
from torch import nn

from salesrl_trl.names import MFU_MODEL, TRACE_FILE, Phase, perf_of
from salesrl_trl.telemetry import perf
from salesrl_trl.telemetry.device import clock_of, device_name, forget_peak, memory_gib
from salesrl_trl.telemetry.flops import ModelFlops, UnknownFlops, model_flops, peak_bf16_flops
from salesrl_trl.telemetry.heartbeat import Heartbeat
from salesrl_trl.telemetry.timeline import MAX_STEPS_KEPT, StepTimes, Timeline
from salesrl_trl.telemetry.trace import STEPS_TRACK, TraceWriter
from salesrl_trl.timing import Span, overlap

logger = logging.getLogger(__name__)

DEFAULT_TRACED_STEPS = range(1, 51)
"""Of a trainer that is given no instruments, as in the recipes."""
BATCHES_KEPT = 256
"""Micro-batches whose lengths are kept before they are summed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InstrumentSettings:
    """What is measured, how often and how much of it is kept."""

    enabled: bool = True
    """Measure at all."""
    perf_steps: int = 1
    """Throughput, utilisation and memory are logged at every so many-th step, over the steps since the last time."""
    trace_steps: range = range(0)
    """Steps that go into the trace; what lies before a run's first step goes with it. One that fails always does,
    unless there is to be no trace at all."""
    trace_bytes: int = 64_000_000
    """Largest trace."""
    heartbeat_s: float = 10.0
    """Seconds after which a phase that lasts is told of; 0 for never."""
    peak_flops: float | None = None
    """Of the device, in FLOP/s, where the table does not know it or is not to be believed."""


class _Scored(NamedTuple):
    """A batch of rewards: from its first call to its last answer, and when the trainer waited for it then."""

    seconds: float
    waits: list[tuple[float, float]]


class Instruments:
    """A run's timeline and what is made of it.

    Built before the model, so that the start-up is measured too. Every rank has one; `figures` is a collective.

    Args:
        settings (`InstrumentSettings`):
            What to do.
        device (`torch.device`):
            This rank's.
        output_dir (`Path`):
            Where the trace goes.
    """

    def __init__(self, settings: InstrumentSettings, device: torch.device, output_dir: Path) -> None:
        self.timeline = Timeline(clock_of(device), perf.OPAQUE_PHASES)
        self.timeline.enabled = settings.enabled
        self.step = 0
        """Optimizer steps done, as far as the trace and the heartbeat know."""
        self._settings = settings
        self._device = device
        self._output_dir = output_dir
        self._peak = settings.peak_flops or peak_bf16_flops(device_name(device))
        self._flops: ModelFlops | None = None
        self._lengths: list[tuple[torch.Tensor, torch.Tensor]] = []  # of prompts and completions that were trained on
        self._trained: torch.Tensor | None = None  # sums over those before, since the last figures; on the device
        self._batches: deque[_Scored] = deque(maxlen=MAX_STEPS_KEPT)  # since the last figures
        self._other_spans: list[Span] = []  # of batches that were trained on in traced steps
        self._waits: list[tuple[float, float]] = []
        self._due: list[perf.Sums] | None = None  # by rank, since throughput was logged
        self._trace: TraceWriter | None = None
        self._is_traced = False  # by this rank, at steps that are to be traced
        self._clock_offset = time.time() - time.perf_counter()  # to the time of day, which machines share
        self._told: set[str] = set()
        self._heartbeat: Heartbeat | None = None
        self._running = False
        self._first_step = 0
        self.details: dict[str, Callable[[], str]] = {}
        """What more a heartbeat says of a phase; called from its thread."""
        self.last_step = 0
        """The step that training ends with, for heartbeats."""

    @property
    def enabled(self) -> bool:
        """Whether anything is measured at the moment. May be turned between steps."""
        return self.timeline.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self.timeline.enabled = value

    def start(self, is_main: bool) -> None:
        """Begin, unless it has begun: the heartbeat and the trace, which are the main rank's."""
        if self._running or not is_main or not self._settings.enabled:
            return
        self._running = True
        if self._settings.heartbeat_s:
            self._heartbeat = Heartbeat(
                lambda: self.timeline.current, self._settings.heartbeat_s, self._where, self.details
            )
            self._heartbeat.start()
        self._is_traced = bool(self._settings.trace_steps)

    def run_begins(self, step: int, last_step: int) -> None:
        """Training begins, after `step` optimizer steps of an earlier one. What is left of that is dropped."""
        self.step = self._first_step = step
        self.last_step = last_step
        self._batches.clear()
        self._other_spans.clear()
        self._waits, self._lengths, self._trained, self._due = [], [], None, None
        self.timeline.starts()

    def record_model(self, model: nn.Module) -> None:
        """Learn what a token costs. A model whose cost can't be known is told of, and has no utilisation."""
        try:
            self._flops = model_flops(model)
        except UnknownFlops as error:
            self._say_once(f"no MFU: {error}")
        except Exception as error:  # a model of another make is no reason to end its training
            self._say_once(f"no MFU: this model can't be counted ({type(error).__name__}: {error})")
        if self._peak is None and self._device.type != "cpu":
            self._say_once(
                f"no MFU: the bf16 peak of {device_name(self._device)!r} is not in the table. Give `peak_tflops`."
            )

    def record_batch(self, prompt_mask: torch.Tensor, completion_mask: torch.Tensor) -> None:
        """A micro-batch goes through forward and backward. Does not wait for the device.

        Args:
            prompt_mask (`torch.Tensor`):
                Shape (B, P).
            completion_mask (`torch.Tensor`):
                Shape (B, C).
        """
        if not self.enabled:
            return
        self._lengths.append((prompt_mask.sum(dim=1), completion_mask.sum(dim=1)))  # each (B,)
        if len(self._lengths) >= BATCHES_KEPT:
            self._count_lengths()

    def record_generation(self, span: Span) -> None:
        """The batch that is trained on now was generated in the background then."""
        if self.enabled and self.step + 1 in self._settings.trace_steps:
            self._other_spans.append(span)

    def record_rewards(
        self, started: float, seconds: float, waits: Sequence[tuple[float, float]], spans: Sequence[Span]
    ) -> None:
        """A batch of training was scored.

        Args:
            started (`float`):
                Time of its first call, of `time.perf_counter`.
            seconds (`float`):
                From there to its last answer.
            waits (`Sequence[tuple[float, float]]`):
                First and last time of each wait of the trainer's thread for this batch.
            spans (`Sequence[Span]`):
                The stages of its completions, for the trace.
        """
        if self.enabled:
            cut = ((max(began, started), min(until, started + seconds)) for began, until in waits)
            self._batches.append(_Scored(seconds, [each for each in cut if each[0] < each[1]]))
            if self.step + 1 in self._settings.trace_steps:
                self._other_spans += spans  # they may lie in earlier steps

    def step_ends(self) -> None:
        """An optimizer step is done."""
        self.timeline.step_ends()
        self.step += 1

    def figures(self, accelerator: Accelerator) -> dict[str, float]:
        """The figures of the steps since the last time, over all ranks; a collective. Empty while nothing is measured.

        Every rank returns the same.
        """
        if not self.enabled:
            return {}
        steps = self.timeline.drain_steps()
        spans = self.timeline.drain_spans()
        self._waits += [(span.started, span.ended) for span in spans if span.name == Phase.REWARD_WAIT]
        if self.timeline.dropped_spans:
            self._say_once("the trace has gaps: more spans between two log lines than are kept (log more often)")
        row = torch.tensor([self._sums(steps).row()], dtype=torch.float64).to(self._device)  # (1, columns)
        ranks = [perf.Sums.from_row(each) for each in gather(row).tolist()]
        self._write_trace(accelerator, steps, spans)
        self._due = ranks if self._due is None else perf.added(self._due, ranks)
        figures = perf.time_figures(ranks)
        if self.step % self._settings.perf_steps == 0:
            figures |= perf.perf_figures(self._due, self._peak)
            self._check_utilisation(figures)
            self._due = None
            forget_peak(self._device)
        return figures

    def close(self) -> None:
        """End what is open and write what is left of the main rank's spans; no collective. May be called twice."""
        self._running = False
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
        steps = self.timeline.drain_steps()
        cut_off = self.timeline.close()
        spans = [
            *self.timeline.drain_spans(),
            *self._other_spans,
            *self._step_spans([*steps, *([cut_off] if cut_off else [])]),
        ]
        if self._is_traced and (self._trace is not None or cut_off is not None):
            self._write([(0, self._clock_offset, spans)])  # the main rank's, which alone traces
        if self._trace is not None:
            self._trace.close()
        self._trace, self._is_traced = None, False

    def _count_lengths(self) -> None:
        """Add what was trained on to the sums: seldom, for it is a dozen of small kernels. Waits for no device."""
        if not self._lengths:
            return
        prompts, completions = (torch.cat(each) for each in zip(*self._lengths, strict=True))  # each (N,)
        self._lengths = []
        lengths = prompts + completions
        samples = torch.ones_like(lengths, dtype=torch.float64).sum()
        sums = torch.stack((lengths.sum().to(torch.float64), samples))
        if self._flops is not None:
            sums = torch.cat((sums, self._flops.sums(lengths, completions)))
        self._trained = sums if self._trained is None else self._trained + sums

    def _where(self) -> str:
        if not self.last_step:
            return "before the first step"
        done = self.step >= self.last_step
        return f"after step {self.step}/{self.last_step}" if done else f"step {self.step + 1}/{self.last_step}"

    def _sums(self, steps: Sequence[StepTimes]) -> perf.Sums:
        seconds: dict[str, float] = {p: sum(step.seconds.get(p, 0.0) for step in steps) for p in Phase}
        batches, waits = list(self._batches), self._waits
        # The trainer's thread begins to wait where the host has issued all other work; the phase of the wait begins
        # where the device is done with it.
        exposed = sum(overlap(mine, wait) for batch in batches for mine in batch.waits for wait in waits)
        self._batches.clear()
        self._waits = []
        tokens, samples, flops = 0.0, 0.0, math.nan
        self._count_lengths()
        if self._trained is not None:
            tokens, samples, *sums = self._trained.tolist()
            flops = self._flops.total(sums) if self._flops is not None else math.nan
            self._trained = None
        return perf.Sums(
            phases=seconds,
            steps=len(steps),
            makespan=sum(batch.seconds for batch in batches),
            exposed=exposed,
            batches=len(batches),
            flops=flops,
            tokens=tokens,
            samples=samples,
            memory=memory_gib(self._device),
        )

    def _step_spans(self, steps: Sequence[StepTimes]) -> list[Span]:
        """A span for each step."""
        first = self.step - sum(step.complete for step in steps) + 1
        return [
            Span(
                name=f"step {number}",
                started=step.started,
                ended=step.ended,
                track=STEPS_TRACK,
                failed=not step.complete,
            )
            for number, step in enumerate(steps, start=first)
        ]

    def _write_trace(self, accelerator: Accelerator, steps: Sequence[StepTimes], spans: Sequence[Span]) -> None:
        """Bring the spans of traced steps from all ranks to the main one; a collective where there are such steps,
        which is the same for all ranks."""
        first = self.step - len(steps) + 1
        traced = [step for number, step in enumerate(steps, start=first) if number in self._settings.trace_steps]
        if not traced:
            return
        before = first == self._first_step + 1 and first in self._settings.trace_steps  # the start-up goes with it
        chosen = [
            span
            for span in (*spans, *self._step_spans(steps))
            if (before and span.ended <= steps[0].started)
            or any(step.started < span.ended <= step.ended for step in traced)
        ]
        chosen += self._other_spans
        self._other_spans = []
        everywhere = gather_object([(accelerator.process_index, self._clock_offset, chosen)])
        if self._is_traced:
            self._write(everywhere)

    def _write(self, everywhere: Sequence[tuple[int, float, Sequence[Span]]]) -> None:
        """Spans by rank and its clock's offset. A disk that is full ends the trace, not the run."""
        starts = [span.started + offset for _, offset, spans in everywhere for span in spans]
        if not starts:
            return
        path = self._output_dir / TRACE_FILE
        try:
            if self._trace is None:
                put_aside(path)
                self._trace = TraceWriter(path, self._settings.trace_bytes, origin=min(starts))
            for rank, offset, spans in everywhere:
                self._trace.write(rank, spans, offset)
        except OSError as error:
            logger.warning(f"the trace ends here: {path} can't be written ({type(error).__name__})")
            if self._trace is not None:
                self._trace.close()
            self._trace, self._is_traced = None, False
            return
        if self._trace.full:
            self._say_once(
                f"{path} is full at {self._settings.trace_bytes / 1e6:.0f} MB: later spans are left out "
                "(`trace_steps` chooses others)"
            )

    def _check_utilisation(self, figures: dict[str, float]) -> None:
        """More than the chip can do is a wrong peak: it is told instead of shown."""
        known = self._flops is not None and self._peak is not None
        if known and figures[perf_of(Phase.FORWARD)] > 0 and math.isnan(figures[MFU_MODEL]):
            self._say_once(
                f"more floating-point operations than {device_name(self._device)!r} can do: its peak is wrong, or the "
                "passes run behind the clock. No MFU is shown; give `peak_tflops`."
            )

    def _say_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            logger.warning(line)


def put_aside(path: Path) -> None:
    """Give a file that is there a name with a number: what an earlier start has left is not written over."""
    if path.exists():
        number = next(n for n in itertools.count(1) if not path.with_stem(f"{path.stem}-{n}").exists())
        path.rename(path.with_stem(f"{path.stem}-{number}"))
