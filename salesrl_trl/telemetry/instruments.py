"""Everything that is measured while a run goes on, and where it goes.

Owns the timeline, what was trained on, the trace and the heartbeat, and brings the ranks' sums together. The names and
the arithmetic of the figures are `perf`'s; the trainer says what happens when.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather, gather_object
from torch import nn

from salesrl_trl.reward.chain import BatchReport
from salesrl_trl.telemetry import perf
from salesrl_trl.telemetry.device import clock_of, device_name, memory_gib
from salesrl_trl.telemetry.flops import ModelFlops, UnknownFlops, model_flops, peak_bf16_flops
from salesrl_trl.telemetry.heartbeat import Heartbeat
from salesrl_trl.telemetry.trace import STEPS_TRACK, TraceWriter
from salesrl_trl.timing import Span, StepTimes, Timeline, overlap

logger = logging.getLogger(__name__)

TRACE_NAME = "trace.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class InstrumentSettings:
    """What is measured, how often and how much of it is kept."""

    enabled: bool = True
    """Measure at all."""
    perf_steps: int = 1
    """Throughput, utilisation and memory are logged at every so many-th step, over the steps since the last time."""
    trace_steps: range = range(0)
    """Steps that go into the trace; what lies before the first step goes with it."""
    trace_bytes: int = 64_000_000
    """Largest trace."""
    heartbeat_s: float = 10.0
    """Seconds after which a phase that lasts is told of; 0 for never."""
    peak_flops: float | None = None
    """Of the device, in FLOP/s, where the table does not know it or is not to be believed."""


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
        self._trained: torch.Tensor | None = None  # sums of what was trained on since the last figures, on the device
        self._makespans: list[tuple[float, float]] = []
        self._waits: list[tuple[float, float]] = []
        self._due: list[perf.Sums] | None = None  # by rank, since throughput was logged
        self._trace: TraceWriter | None = None
        self._told: set[str] = set()
        self._heartbeat: Heartbeat | None = None
        self._running = False
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
        if self._settings.trace_steps:
            self._trace = TraceWriter(self._output_dir / TRACE_NAME, self._settings.trace_bytes)

    def see_model(self, model: nn.Module) -> None:
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

    def see_batch(self, prompt_mask: torch.Tensor, completion_mask: torch.Tensor) -> None:
        """A micro-batch goes through forward and backward. Does not wait for the device.

        Args:
            prompt_mask (`torch.Tensor`):
                Shape (B, P).
            completion_mask (`torch.Tensor`):
                Shape (B, C).
        """
        if not self.enabled:
            return
        completions = completion_mask.sum(dim=1)  # (B,)
        lengths = prompt_mask.sum(dim=1) + completions  # (B,)
        samples = torch.full((), float(len(lengths)), dtype=torch.float64, device=lengths.device)
        sums = torch.stack((lengths.sum().to(torch.float64), samples))
        if self._flops is not None:
            sums = torch.cat((sums, self._flops.sums(lengths, completions)))
        self._trained = sums if self._trained is None else self._trained + sums

    def see_rewards(self, report: BatchReport) -> None:
        """A batch of training was scored."""
        if self.enabled:
            self._makespans.append((report.started, report.started + report.seconds))
            self.timeline.add(report.spans)

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
        steps = self.timeline.take()
        spans = self._take_spans(steps)
        row = torch.tensor([self._sums(steps).row()], dtype=torch.float64).to(self._device)  # (1, columns)
        ranks = [perf.Sums.from_row(each) for each in gather(row).tolist()]
        self._write_trace(accelerator, spans)
        self._due = ranks if self._due is None else perf.added(self._due, ranks)
        figures = perf.time_figures(ranks)
        if self.step % self._settings.perf_steps == 0:
            figures |= perf.perf_figures(self._due, self._peak)
            self._check_utilisation(figures)
            self._due = None
        return figures

    def close(self, accelerator: Accelerator | None = None) -> None:
        """End what is open and write what is left of this rank's spans; no collective. May be called twice."""
        self._running = False
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
        try:
            cut_off = self.timeline.close()
        except RuntimeError as error:  # the device is in no state to be asked any more
            self._say_once(f"the last step can't be told, since the device failed ({type(error).__name__})")
            cut_off = None
        spans = self._take_spans([] if cut_off is None else [cut_off])
        if self._trace is not None:
            rank = 0 if accelerator is None else accelerator.process_index
            self._write(self._trace, rank, spans, _clock_offset())
            if self._trace is not None:
                self._trace.close()
            self._trace = None

    def _where(self) -> str:
        return f"step {self.step + 1}/{self.last_step}" if self.last_step else "before the first step"

    def _sums(self, steps: Sequence[StepTimes]) -> perf.Sums:
        seconds = {phase: sum(step.seconds.get(phase, 0.0) for step in steps) for phase in perf.PHASES}
        exposed = sum(overlap(makespan, wait) for makespan in self._makespans for wait in self._waits)
        makespans, self._makespans, self._waits = self._makespans, [], []
        tokens, samples, flops = 0.0, 0.0, math.nan
        if self._trained is not None:
            tokens, samples, *sums = self._trained.tolist()
            flops = self._flops.total(sums) if self._flops is not None else math.nan
            self._trained = None
        return perf.Sums(
            phases=seconds,
            steps=len(steps),
            makespan=sum(ended - started for started, ended in makespans),
            exposed=exposed,
            batches=len(makespans),
            flops=flops,
            tokens=tokens,
            samples=samples,
            memory=memory_gib(self._device),
        )

    def _take_spans(self, steps: Sequence[StepTimes]) -> list[Span]:
        """What ended, with a span for each step; the waits for rewards are remembered."""
        spans = self.timeline.take_spans()
        self._waits += [(span.started, span.ended) for span in spans if span.name == perf.REWARD_WAIT]
        first = self.step - sum(step.complete for step in steps) + 1
        return spans + [
            Span(
                name=f"step {first + index}",
                started=step.started,
                ended=step.ended,
                track=STEPS_TRACK,
                failed=not step.complete,
            )
            for index, step in enumerate(steps)
        ]

    def _write_trace(self, accelerator: Accelerator, spans: list[Span]) -> None:
        """Bring all ranks' spans to the main one; in a step that is traced, which is the same for all."""
        if self.step not in self._settings.trace_steps:
            return
        everywhere = gather_object([(accelerator.process_index, _clock_offset(), spans)])
        if self._trace is None:
            return
        for rank, offset, theirs in everywhere:
            self._write(self._trace, rank, theirs, offset)
        if self._trace is not None and self._trace.full:
            self._say_once(
                f"{self._trace.path} is full at {self._settings.trace_bytes / 1e6:.0f} MB: later spans are left out "
                "(`trace_steps` chooses others)"
            )

    def _write(self, trace: TraceWriter, rank: int, spans: Sequence[Span], offset: float) -> None:
        """A disk that is full ends the trace, not the run."""
        if self._trace is None:
            return
        try:
            trace.write(rank, spans, offset)
        except OSError as error:
            trace.close()
            self._trace = None
            logger.warning(f"the trace ends here: {trace.path} can't be written ({type(error).__name__})")

    def _check_utilisation(self, figures: dict[str, float]) -> None:
        """More than the chip can do is a wrong peak: it is told instead of shown."""
        known = self._flops is not None and self._peak is not None
        if known and figures["perf/forward_s"] > 0 and math.isnan(figures[perf.MFU_MODEL]):
            self._say_once(
                f"more floating-point operations than {device_name(self._device)!r} can do: its peak is wrong, or the "
                "passes run behind the clock. No MFU is shown; give `peak_tflops`."
            )

    def _say_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            logger.warning(line)


def _clock_offset() -> float:
    """What makes `time.perf_counter` the time of day, which machines share."""
    return time.time() - time.perf_counter()
