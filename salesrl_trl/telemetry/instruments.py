"""All measurements of a run in one object: timeline, trained lengths, trace, heartbeat, and start-up times."""

import json
import logging
import math
import os
import threading
import time
import tomllib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel, gather
from transformers import TrainerCallback, TrainerState

from salesrl_trl.names import MEMORY, MFU_MODEL, START_UP_FILE, TRACE_FILE, Phase, StartUp, perf_of
from salesrl_trl.telemetry import perf
from salesrl_trl.telemetry.device import EventClock, MachineUse, device_name, forget_peak, memory_gib
from salesrl_trl.telemetry.logs import spared, warn_once
from salesrl_trl.telemetry.perf import peak_bf16_flops
from salesrl_trl.telemetry.timeline import MAX_STEPS_KEPT, StepTimes, Timeline
from salesrl_trl.telemetry.trace import StepTrace
from salesrl_trl.timing import PHASES_TRACK, Span, overlap

if TYPE_CHECKING:
    from salesrl_trl.telemetry.flops import ModelFlops

logger = logging.getLogger(__name__)

BATCHES_KEPT = 256  # micro-batches whose lengths are buffered before being summed


@dataclass(frozen=True, kw_only=True, slots=True)
class InstrumentSettings:
    """What to measure, and how much to keep."""

    trace_steps: range = range(0)
    """Steps to trace. The first step includes the start-up, and failing steps are always traced. An empty range
    disables the trace."""
    trace_bytes: int = 64_000_000  # maximum size of the trace
    heartbeat_s: float = 10.0  # log a heartbeat when a phase lasts longer than this, in seconds; 0 disables it
    peak_flops: float | None = None  # the device's peak in FLOP/s, overriding the table of peaks


class Instruments:
    """A run's timeline and the metrics derived from it. Every rank has one for its device; `figures` is a collective.
    Writes the trace to `output_dir`."""

    def __init__(self, settings: InstrumentSettings, device: torch.device, output_dir: Path) -> None:
        self.timeline = Timeline(EventClock() if device.type == "cuda" else None, perf.OPAQUE_PHASES)
        self.details: dict[str, Callable[[], str]] = {}
        """By phase, a function that returns details for the heartbeat. Called on the heartbeat thread."""
        self.step = 0  # completed optimizer steps, for the trace and the heartbeat
        self._settings = settings
        self._device = device
        self._peak = settings.peak_flops or peak_bf16_flops(device_name(device))
        self._flops: ModelFlops | None = None  # if known
        self._lengths: list[tuple[torch.Tensor, ...]] = []  # prompt and completion tokens, and `has_prompt`
        self._trained: torch.Tensor | None = None  # sums since the last `figures`, on the device
        # since the last `figures`: seconds from the first call to the last answer, and the trainer's waits in between
        self._batches: deque[tuple[float, list[tuple[float, float]]]] = deque(maxlen=MAX_STEPS_KEPT)
        self._waits: list[tuple[float, float]] = []
        self._trace = StepTrace(output_dir / TRACE_FILE, settings.trace_steps, settings.trace_bytes)
        self._output_dir = output_dir
        self.machine = MachineUse(device)
        self._heartbeat: Heartbeat | None = None
        self.last_step = 0  # the last step of training, for heartbeats

    def start(self, is_main: bool) -> None:
        """Start the heartbeat and the trace, on the main rank. A second call does nothing."""
        if not is_main:
            return
        if self._settings.heartbeat_s and self._heartbeat is None:
            self._heartbeat = Heartbeat(self, self._settings.heartbeat_s)
        self._trace.start()

    def run_begins(self, step: int, last_step: int) -> None:
        """Begin training after `step` optimizer steps. Drops measurements of an earlier training."""
        self.step = step
        self.last_step = last_step
        self._batches.clear()
        self._trace.begin_training(step)
        self._waits, self._lengths, self._trained = [], [], None
        self.timeline.starts()

    def count_flops(self, model: torch.nn.Module) -> None:
        """Count the FLOPs per token for the MFU. Warns if they, or the device's peak, are unknown."""
        if self._peak is None:
            if self._device.type != "cpu":
                name = device_name(self._device)
                warn_once(f"no MFU: the bf16 peak of {name!r} is not in the table. Set `peak_tflops`.")
            return
        from salesrl_trl.telemetry import flops  # not needed on a CPU

        try:
            self._flops = flops.model_flops(extract_model_from_parallel(model))
        except flops.UnknownFlops as error:
            warn_once(f"no MFU: {error}")
        except Exception as error:  # an unknown kind of model must not end the run
            warn_once(f"no MFU: this model can't be counted ({type(error).__name__}: {error})")

    def record_batch(
        self, prompt_mask: torch.Tensor, completion_mask: torch.Tensor, has_prompt: Sequence[bool] | None = None
    ) -> None:
        """Record a micro-batch that is trained on, without synchronising with the device. The masks have shapes (B, P)
        and (B, C). `has_prompt` is False if another completion's forward pass already processed the prompt."""
        prompts, completions = prompt_mask.sum(dim=1), completion_mask.sum(dim=1)  # (B,)
        own = torch.tensor([True] * len(prompts) if has_prompt is None else has_prompt)
        self._lengths.append((prompts, completions, own.to(prompts.device, non_blocking=True)))
        if len(self._lengths) >= BATCHES_KEPT:
            self._count_lengths()

    def record_rewards(
        self, started: float, seconds: float, waits: Sequence[tuple[float, float]], spans: Sequence[Span]
    ) -> None:
        """Record a scored training batch. Its first call began at `started` on the `time.perf_counter` clock, and its
        last answer arrived `seconds` later. `waits`: start and end of each wait of the trainer's thread for it.
        `spans`: the stages of its completions."""
        cut = ((max(began, started), min(until, started + seconds)) for began, until in waits)
        self._batches.append((seconds, [wait for wait in cut if wait[0] < wait[1]]))
        self._trace.add(self.step + 1, spans)  # they may start in earlier steps

    def step_ends(self) -> None:
        self.timeline.step_ends()
        self.step += 1

    def figures(self, accelerator: Accelerator) -> dict[str, float]:
        """The metrics of the steps since the last call, over all ranks; a collective. Identical on every rank, except
        `names.MACHINE`, which are per machine."""
        steps = self.timeline.drain_steps()
        spans = self.timeline.drain_spans()
        self._waits += [(span.started, span.ended) for span in spans if span.name == Phase.REWARD_WAIT]
        sums = self._sums(steps)
        row = torch.tensor([[sums[name] for name in perf.COLUMNS]], dtype=torch.float64).to(self._device)
        ranks = [dict(zip(perf.COLUMNS, rank, strict=True)) for rank in gather(row).tolist()]
        if steps and accelerator.is_main_process and any(span.name == StartUp.IMPORTS for span in spans):
            write_start(spans, steps[0], self._output_dir)
        self._trace.write(accelerator.process_index, self.step, steps, spans)
        figures = perf.time_figures(ranks) | perf.perf_figures(ranks, self._peak) | self.machine.drain()
        known = self._flops is not None and self._peak is not None
        if known and figures[perf_of(Phase.FORWARD)] > 0 and math.isnan(figures[MFU_MODEL]):
            warn_once(
                f"more FLOPs than {device_name(self._device)!r} can deliver: its peak is wrong, or the timing of "
                "forward and backward passes. The MFU is omitted. Set `peak_tflops`."
            )
        forget_peak(self._device)
        return figures

    def close(self) -> None:
        """End all open phases and write the main rank's last spans; not a collective. Idempotent."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
        steps, cut_off = self.timeline.drain_steps(), self.timeline.close()
        self._trace.close(self.step, steps, cut_off, self.timeline.drain_spans())

    def _count_lengths(self) -> None:
        """Add the buffered lengths to the sums. Called rarely, as it launches a dozen small kernels. Never blocks."""
        if not self._lengths:
            return
        prompts, completions, own = (torch.cat(column) for column in zip(*self._lengths, strict=True))  # (N,)
        self._lengths = []
        lengths = prompts + completions
        samples = torch.ones_like(lengths, dtype=torch.float64).sum()
        sums = torch.stack((lengths.sum().to(torch.float64), samples))
        if self._flops is not None:
            sums = torch.cat((sums, self._flops.sums(lengths, completions, own)))
        self._trained = sums if self._trained is None else self._trained + sums

    def where(self) -> str:
        if not self.last_step:
            return "before the first step"
        done = self.step >= self.last_step
        return f"after step {self.step}/{self.last_step}" if done else f"step {self.step + 1}/{self.last_step}"

    def _sums(self, steps: Sequence[StepTimes]) -> perf.Sums:
        seconds: perf.Sums = {phase: sum(step.seconds.get(phase, 0.0) for step in steps) for phase in Phase}
        batches, waits = list(self._batches), self._waits
        # The trainer's thread starts waiting once the host has issued all other work. The wait's phase starts when the
        # device has finished that work.
        exposed = sum(overlap(mine, wait) for _, own in batches for mine in own for wait in waits)
        self._batches.clear()
        self._waits = []
        tokens, samples, flops = 0.0, 0.0, math.nan
        self._count_lengths()
        if self._trained is not None:
            tokens, samples, *sums = self._trained.tolist()
            flops = self._flops.total(sums) if self._flops is not None else math.nan
            self._trained = None
        return {
            **seconds,
            perf.STEPS: len(steps),
            perf.MAKESPAN: sum(makespan for makespan, _ in batches),
            perf.EXPOSED: exposed,
            perf.BATCHES: len(batches),
            perf.FLOPS: flops,
            perf.TOKENS: tokens,
            perf.SAMPLES: samples,
            **dict(zip(MEMORY, memory_gib(self._device), strict=True)),
        }


ADVICE: dict[str, str] = tomllib.loads(Path(__file__).with_name("advice.toml").read_text(encoding="utf-8"))


class Heartbeat:
    """Logs a line about a long phase: after `after_s` seconds, then each time its duration has doubled. Only reads the
    training thread's state."""

    def __init__(self, events: Instruments, after_s: float) -> None:
        self._events, self._after_s = events, after_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        logged, next_s = "", 0.0  # the last line's phase, and when the next line is due
        last_seconds = 0.0
        while not self._stopped.wait(min(self._after_s / 4, 1.0)):
            machine, now = self._events.machine.sample(), self._events.timeline.current
            if now is None:
                continue
            name, seconds = now
            if name != logged or seconds < last_seconds:
                logged, next_s = name, self._after_s
            last_seconds = seconds
            if seconds >= next_s:
                try:
                    logger.info(self.line(name, seconds, machine))
                except Exception as error:  # an error in the details must not end the thread
                    failed = type(error).__name__
                    logger.warning(f"[Heartbeat] {name} for {seconds:.0f} s ({failed} while collecting details)")
                next_s = self._after_s * 2 ** (math.floor(math.log2(seconds / self._after_s)) + 1)

    def line(self, phase: str, seconds: float, machine: str) -> str:
        """`[Heartbeat] step 1/21: reward_wait for 12 s: 52 in judge (of 64 completions). Look at: ...`"""
        more = self._events.details[phase]() if phase in self._events.details else ""
        detail = f": {more}" if more else ""
        hint = ADVICE.get(phase, "").removesuffix("; a late rank" if os.environ.get("WORLD_SIZE", "1") == "1" else "")
        advice = f". Look at: {hint}" if hint else ""
        about = f" ({machine})" if machine else ""
        return f"[Heartbeat] {self._events.where()}: {phase} for {seconds:.0f} s{about}{detail}{advice}"


@dataclass(eq=False)
class StepMarks(TrainerCallback):
    """Marks the start of a run, the end of each step, and the end of the run. Calls `prepare` before the first mark,
    `begin` after it, and `end` before the last one."""

    events: Instruments
    prepare: Callable[[], None]
    begin: Callable[[], None]
    end: Callable[[], None]

    def on_train_begin(
        self, _: object, state: TrainerState, __: object, model: torch.nn.Module, **___: object
    ) -> None:
        self.prepare()
        self.events.timeline.end(StartUp.PREPARE)
        self.events.run_begins(state.global_step, state.max_steps)
        self.events.count_flops(model)
        self.begin()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.events.timeline.end(Phase.OPTIMIZER)
        self.events.step_ends()

    def on_train_end(self, *_: object, **__: object) -> None:
        self.end()
        self.events.timeline.stops()


SHOWN_S = 0.05  # the line omits shorter phases; the file lists all


def imports_so_far() -> Span:
    """The time from the start of this process until now: Python start-up and imports."""
    after_name = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    began = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # seconds since the machine started, to 10 ms
    now = time.perf_counter()
    return Span(name=StartUp.IMPORTS, started=now - (time.clock_gettime(time.CLOCK_BOOTTIME) - began), ended=now)


def write_start(spans: Sequence[Span], first: StepTimes, output_dir: Path) -> None:
    """Log start-up times, from all spans so far and the first step, and write them to a file: `[Start] 31.4 s to the
    end of the first step: imports 9.0, first step 4.0, other 0.2; concurrently: ...`. Phases are sequential; others
    run in parallel threads and processes. A full disk does not end the run."""
    known = sorted((span for span in spans if span.name in set(StartUp)), key=attrgetter("started"))
    phases, beside = dict[str, float](), dict[str, float]()
    for span in known:
        sums = phases if span.track == PHASES_TRACK else beside
        sums[span.name] = sums.get(span.name, 0.0) + span.seconds
    total = first.ended - min([first.started, *(span.started for span in known)])
    other = max(total - sum(phases.values()) - first.wall, 0.0)
    parts, side = (
        ", ".join(f"{name} {seconds:.1f}" for name, seconds in each.items() if seconds >= SHOWN_S)
        for each in ({**phases, "first step": first.wall, "other": other}, beside)
    )
    more = f"; concurrently: {side}" if side else ""
    logger.info(f"[Start] {total:.1f} s to the end of the first step: {parts}{more}")
    figures = {"total_s": total, "phases_s": phases, "beside_s": beside, "first_step_s": first.wall}
    with spared(START_UP_FILE, OSError):
        (output_dir / START_UP_FILE).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
