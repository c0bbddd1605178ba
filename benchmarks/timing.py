"""The cost of measuring: step time with the instruments on over step time with them off, in one training run.

    .venv/bin/python -m benchmarks.timing [--shape 0.5b|7b|demo|tiny] [--updates 6] [--rounds 10] [--json FILE]

- One trainer trains random weights on random tokens. It neither generates nor waits for a reward, as in
  `benchmarks.kl`. Each completion leaves the spans of its reward's stages.
- The instruments (phases, sums, metrics, trace, heartbeat) are turned on and off by blocks of updates: on, off, off,
  on. These four are a round.
- An update is timed from its beginning to the beginning of the next one, so that its log line counts. The device is
  synchronised there. The first update of a block is not counted.
- The figure is the median, over rounds, of the round's time with instruments over its time without.
- Beside it stands the host's time inside the instruments, for each step. It is less noisy, and on a GPU it is the
  whole cost, as no call waits for the device.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import TrainerCallback, set_seed
from trl import GRPOTrainer

from benchmarks.common import build_trainer, device, now, ratio_line, ratios, run_in_rounds, save_model
from benchmarks.service import InstantReward
from salesrl_trl.names import (
    MFU_MODEL,
    MFU_STEP,
    STEP_SECONDS,
    TRACE_FILE,
    Phase,
    Stage,
    time_of,
)
from salesrl_trl.reward.batch import BatchResult, RewardBatch
from salesrl_trl.telemetry.instruments import Instruments, InstrumentSettings
from salesrl_trl.telemetry.timeline import Timeline
from salesrl_trl.timing import Span

ORDER = (True, False, False, True)
"""Instruments on or off, by block of a round."""


class SwitchedTimeline(Timeline):
    """A timeline that can be turned off: then nothing is marked and no step is counted."""

    is_on = True

    def begin(self, name: str) -> Any:
        return super().begin(name) if self.is_on else None

    def step_ends(self) -> None:
        if self.is_on:
            super().step_ends()
        else:
            self.stops()

    def add(self, spans: Iterable[Span]) -> None:
        if self.is_on:
            super().add(spans)


class SwitchedInstruments(Instruments):
    """Instruments that measure nothing while their timeline is off."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        own = self.timeline
        self.timeline: SwitchedTimeline = SwitchedTimeline(own._clock, own._opaque)

    def record_batch(self, *given: Any, **named: Any) -> None:
        if self.timeline.is_on:
            super().record_batch(*given, **named)

    def record_rewards(self, *given: Any, **named: Any) -> None:
        if self.timeline.is_on:
            super().record_rewards(*given, **named)

    def figures(self, accelerator: Accelerator) -> dict[str, float]:
        return super().figures(accelerator) if self.timeline.is_on else {}


class SpannedReward(InstantReward):
    """Instant, with the spans that a chain of calls would leave."""

    async def result(self, batch: RewardBatch, completions: Sequence[Any]) -> BatchResult:
        """A span for each stage of each completion."""
        result, moment = await super().result(batch, completions), time.perf_counter()
        spans = [
            Span(name=stage, started=moment, ended=moment, track=f"reward {place}")
            for place in range(len(batch))
            for stage in Stage
        ]
        return replace(result, report=replace(result.report, started=moment, spans=spans))


class Meter:
    """Host seconds inside some methods of an object. Nested calls count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def watch(self, owner: Any, *names: str) -> None:
        """Count the methods from now on."""
        for name in names:
            setattr(owner, name, self._counted(getattr(owner, name)))

    def watch_instruments(self, instruments: Instruments) -> None:
        """Count all calls of the trainer into the instruments."""
        self.watch(instruments, "figures", "record_batch", "record_rewards", "step_ends")
        self.watch(instruments.timeline, "begin", "end")

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - started

        return counted


class Switch(TrainerCallback):
    """Turns the instruments on and off, and keeps the seconds of each update."""

    def __init__(self, instruments: SwitchedInstruments, updates: int) -> None:
        self.seconds: dict[int, list[float]] = {}
        """By block."""
        self._instruments = instruments
        self._updates = updates
        self._step = -1
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        moment = now()
        if self._step >= 0:
            self.seconds.setdefault(self._step // self._updates, []).append(moment - self._started)
        self._step += 1
        self._instruments.timeline.is_on = ORDER[self._step // self._updates % len(ORDER)]
        self._started = time.perf_counter()


def measure(shape: str, updates: int, rounds: int) -> dict[str, Any]:
    """Step times with and without instruments, their ratio, and what the instruments say."""
    set_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        model, run = save_model(shape, Path(scratch, "model"), device()), Path(scratch, "run")
        settings = InstrumentSettings(trace_steps=range(2**62), trace_bytes=10**9)
        instruments = SwitchedInstruments(settings, device(), run)
        steps = (rounds + 1) * len(ORDER) * updates + 1  # a round to warm up
        switch, meter = Switch(instruments, updates), Meter()
        trainer = build_trainer(True, shape, model, str(run), steps, switch, SpannedReward(), instruments)
        meter.watch_instruments(instruments)
        trainer.train()
        instruments.close()
        trace_bytes = (run / TRACE_FILE).stat().st_size
    seconds: dict[str, list[list[float]]] = {"without": [], "with": []}
    for first in range(len(ORDER), (rounds + 1) * len(ORDER), len(ORDER)):
        for name, wanted in (("without", False), ("with", True)):
            blocks = [first + place for place, on in enumerate(ORDER) if on == wanted]
            seconds[name].append([each for block in blocks for each in switch.seconds[block][1:]])
    return {
        **ratios(seconds, "with", "without"),
        "own_s": meter.seconds / (steps / 2),  # they are on in half of the steps
        "mfu": {name: _median(trainer, name) for name in (MFU_MODEL, MFU_STEP)},
        "unaccounted": _median(trainer, time_of(Phase.UNACCOUNTED)) / _median(trainer, STEP_SECONDS),
        "trace_bytes": trace_bytes,
    }


def _median(trainer: GRPOTrainer, name: str) -> float:
    """A metric's median over the updates that have it; 0 where none has."""
    values = [entry[name] for entry in trainer.state.log_history if entry.get(name) is not None]
    return statistics.median(values) if values else 0.0


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    figures = run_in_rounds(argv, __doc__, measure, "demo", 6)
    own_s, unaccounted = figures["own_s"], figures["unaccounted"]
    mfu = ", ".join(f"{name} {value:.3f}" if value else f"{name} n/a" for name, value in figures["mfu"].items())
    print(
        f"{ratio_line(figures)}; inside the instruments {1000 * own_s:.2f} ms a step, "
        f"{own_s / figures['median_s']['without']:.3%}; {mfu}; unaccounted {unaccounted:.2%} of a step"
    )


if __name__ == "__main__":
    main()
