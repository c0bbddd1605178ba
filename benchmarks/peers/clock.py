"""The clock of the arms that run on a transformers trainer."""

import itertools
import math
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.peers.task import Plan, write_result

LENGTH = "completions/mean_length"


class Clock(TrainerCallback):
    """Writes the result after each step, so that a run that is cut off leaves its figures."""

    def __init__(self, plan: Plan, out: Path) -> None:
        self._plan, self._out = plan, out
        self._ends: list[float] = []
        self._lengths: list[float] = []
        self._phases: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step >= self._plan.last_counted
        if not state.is_world_process_zero:
            return
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.synchronize()
        self._ends.append(time.perf_counter())
        seconds = [math.nan, *(end - start for start, end in itertools.pairwise(self._ends))]
        print(f"step {len(seconds)}: {seconds[-1]:.2f} s", flush=True)
        peak = round(torch.cuda.max_memory_allocated() / 2**30, 1) if on_gpu else None
        lengths = [round(value) for value in self._lengths]
        more = {"completion_tokens": lengths, "peak_gib": peak, "phases_s": self._phases}
        write_result(self._out, self._plan, seconds, **more)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and LENGTH in logs:
            self._lengths.append(float(logs[LENGTH]))
            known = {name: value for name, value in logs.items() if name.startswith("time/") and value}
            self._phases.append({name: round(value, 2) for name, value in known.items()})
