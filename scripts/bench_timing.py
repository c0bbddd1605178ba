#!/usr/bin/env python3
"""What measuring costs: step time with the instruments on over step time with them off, in one training run.

    .venv/bin/python scripts/bench_timing.py [--shape 0.5b|demo|tiny] [--updates 6] [--rounds 10] [--json FILE]

One trainer trains random weights on completions of random tokens, made and scored in no time (scripts/bench_kl.py),
with four spans of a reward for each completion. Its instruments (phases, sums, metrics, trace, heartbeat) are turned
on and off by blocks of updates (on, off, off, on, ...). An update is timed from its beginning to that of the next one,
so that its log line counts, with the device synchronised there; the first of each block is left out. Four blocks are a
round; the figure is the median over rounds of the round's time with instruments over its time without. Beside it
stands what the host spends inside the instruments in a step, which is less noisy, and all there is on a GPU, as no
call waits for it.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_kl import BATCH, SHAPES, TOKENS, build, run_bench
from bench_rewards import InstantReward
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback, set_seed
from trl import GRPOTrainer

from salesrl_trl.names import MFU_MODEL, MFU_STEP, STEP_SECONDS, TRACE_FILE, Stage, time_of
from salesrl_trl.reward.batch import BatchReport
from salesrl_trl.telemetry.instruments import Instruments, InstrumentSettings
from salesrl_trl.timing import UNACCOUNTED, Span

# the demo's policy and batch
SHAPES["demo"] = {
    "vocab_size": 3072,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
TOKENS["demo"], BATCH["demo"] = 32, (48, 1)
# Qwen2.5-7B
SHAPES["7b"] = {
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
TOKENS["7b"], BATCH["7b"] = 512, (8, 8)
ORDER = (True, False, False, True)
"""Instruments on or off, by block of a round."""


class SpannedReward(InstantReward):
    """Instant, with the spans that a chain of calls would leave."""

    def take_report(self) -> BatchReport:
        """A span for each stage of each completion."""
        now = time.perf_counter()
        spans = [
            Span(name=stage, started=now, ended=now, track=f"reward {place}")
            for place in range(len(self.last))
            for stage in Stage
        ]
        return replace(super().take_report(), started=now, spans=spans)


class Meter:
    """Host seconds inside some methods of an object, those of nested calls counted once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def watch(self, owner: Any, *names: str) -> None:
        """Count the methods from now on."""
        for name in names:
            setattr(owner, name, self._counted(getattr(owner, name)))

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
    """Turns the instruments on and off, and keeps each update's seconds."""

    def __init__(self, instruments: Instruments, updates: int) -> None:
        self.seconds: dict[int, list[float]] = {}
        """By block."""
        self._instruments = instruments
        self._updates = updates
        self._step = -1
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._step >= 0:
            self.seconds.setdefault(self._step // self._updates, []).append(now - self._started)
        self._step += 1
        self._instruments.enabled = ORDER[self._step // self._updates % len(ORDER)]
        self._started = time.perf_counter()


def measure(shape: str, updates: int, rounds: int) -> dict[str, Any]:
    """Step times with and without, and their ratio."""
    set_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        with device:
            model = Qwen2ForCausalLM._from_config(
                Qwen2Config(**SHAPES[shape]), dtype=torch.bfloat16 if device.type == "cuda" else torch.float32
            )
        model.save_pretrained(f"{scratch}/model")
        del model
        settings = InstrumentSettings(trace_steps=range(2**62), trace_bytes=10**9)
        instruments = Instruments(settings, device, Path(scratch, "run"))
        steps = (rounds + 1) * len(ORDER) * updates + 1  # a round to warm up
        trainer = build("branches", shape, f"{scratch}/model", f"{scratch}/run", steps, SpannedReward(), instruments)
        meter = Meter()
        meter.watch(instruments, "figures", "record_batch", "record_rewards", "step_ends")
        meter.watch(instruments.timeline, "_open", "_close")
        switch = Switch(instruments, updates)
        trainer.add_callback(switch)
        trainer.train()
        instruments.close()
        trace_bytes = Path(scratch, "run", TRACE_FILE).stat().st_size
    by_round: dict[bool, list[float]] = {True: [], False: []}
    for index in range(1, rounds + 1):
        blocks = {True: [], False: []}
        for place, on in enumerate(ORDER):
            blocks[on] += switch.seconds[index * len(ORDER) + place][1:]
        for on, seconds in blocks.items():
            by_round[on].append(statistics.median(seconds))
    ratios = [on / off for on, off in zip(by_round[True], by_round[False], strict=True)]
    return {
        "shape": shape,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "rounds": rounds,
        "median_s": {"with": statistics.median(by_round[True]), "without": statistics.median(by_round[False])},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "own_s": meter.seconds / (steps / 2),  # on in half of them
        "mfu": {name: _median(trainer, name) for name in (MFU_MODEL, MFU_STEP)},
        "unaccounted": _median(trainer, time_of(UNACCOUNTED)) / _median(trainer, STEP_SECONDS),
        "trace_bytes": trace_bytes,
    }


def _median(trainer: GRPOTrainer, name: str) -> float:
    """Of a metric over the updates that have it, 0 where none has."""
    values = [entry[name] for entry in trainer.state.log_history if entry.get(name) is not None]
    return statistics.median(values) if values else 0.0


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and tell."""
    figures = run_bench(argv, __doc__, measure, "demo", 6)
    medians, ratios = figures["median_s"], figures["ratios"]
    mfu = ", ".join(f"{name} {value:.3f}" if value else f"{name} n/a" for name, value in figures["mfu"].items())
    print(
        f"{figures['device']}, {figures['shape']}, {figures['rounds']} rounds: with {medians['with']:.4f} s, "
        f"without {medians['without']:.4f} s, ratio {figures['ratio']:.4f} ({min(ratios):.4f} to {max(ratios):.4f}); "
        f"inside the instruments {1000 * figures['own_s']:.2f} ms a step, "
        f"{figures['own_s'] / medians['without']:.3%}; {mfu}; unaccounted {figures['unaccounted']:.2%} of a step"
    )


if __name__ == "__main__":
    main()
