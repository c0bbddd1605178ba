"""Names and arithmetic of time, throughput and memory.

Owns what the figures are called and how ranks' sums become figures. Where the sums come from is `instruments`'.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from salesrl_trl.telemetry.flops import mfu
from salesrl_trl.telemetry.metrics import REWARD_SECONDS
from salesrl_trl.timing import UNACCOUNTED

DATA_LOADING = "data_loading"
WEIGHT_PUSH = "weight_push"
GENERATION = "generation"
OLD_LOGPROBS = "old_logprobs"
REFERENCE_LOGPROBS = "reference_logprobs"
REWARD_WAIT = "reward_wait"
ADVANTAGES = "advantages"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
BATCHING = "batching"
"""Tokens to tensors, shuffling, splitting, and what else a training step does around its passes."""
LOGGING = "logging"
CHECKPOINT = "checkpoint"
EVALUATION = "evaluation"
PHASES = (DATA_LOADING, WEIGHT_PUSH, GENERATION, OLD_LOGPROBS, REFERENCE_LOGPROBS, REWARD_WAIT, ADVANTAGES, BATCHING,
          FORWARD, BACKWARD, OPTIMIZER, LOGGING, CHECKPOINT, EVALUATION, UNACCOUNTED)  # fmt: skip
"""Every part of a step, in the order of a step. They sum to `STEP_SECONDS`."""
OPAQUE_PHASES = (EVALUATION, CHECKPOINT)
"""An evaluation generates, scores and logs too: that is evaluation."""
COMPUTE_PHASES = (WEIGHT_PUSH, GENERATION, OLD_LOGPROBS, REFERENCE_LOGPROBS, FORWARD, BACKWARD, OPTIMIZER)
"""Phases in which the accelerator works."""

STEP_SECONDS = "time/step_s"
REWARD_EXPOSED = "time/reward_exposed_s"
"""Of the rewards' makespan, what the trainer spent waiting."""
REWARD_HIDDEN = "time/reward_hidden_s"
"""The rest: it ran behind other work."""
MFU_MODEL = "perf/mfu_model"
MFU_STEP = "perf/mfu_step"
THROUGHPUT = ("perf/forward_s", "perf/backward_s", "perf/optimizer_s", "perf/data_loading_s",
              "perf/data_loading_ratio", "perf/compute_ratio", "perf/tokens_per_s", "perf/samples_per_s", MFU_MODEL,
              MFU_STEP)  # fmt: skip
MEMORY = ("memory/gpu_allocated_gib", "memory/gpu_reserved_gib", "memory/gpu_peak_gib", "memory/host_gib")


def time_of(phase: str) -> str:
    """Seconds of a step in a phase, mean over ranks."""
    return f"time/{phase}_s"


TIMES = (*(time_of(phase) for phase in PHASES), STEP_SECONDS, REWARD_EXPOSED, REWARD_HIDDEN)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """What one rank did over some steps, as it travels between ranks."""

    phases: Mapping[str, float]
    """Seconds, by the names in `PHASES`."""
    steps: int
    """How many steps."""
    makespan: float
    """Seconds of rewards, from a batch's first call to its last answer, summed over batches."""
    exposed: float
    """Seconds of it in which the trainer waited for them."""
    batches: int
    """Batches that were scored."""
    flops: float
    """Of the policy's forward and backward passes; NaN where it can't be known."""
    tokens: float
    """Prompt and completion tokens trained on, padding left out."""
    samples: float
    """Completions trained on."""
    memory: tuple[float, float, float, float]
    """By the names in `MEMORY`."""

    @property
    def wall(self) -> float:
        """Seconds of the steps together."""
        return sum(self.phases.values())

    def row(self) -> list[float]:
        """As numbers, to be gathered."""
        phases = [self.phases.get(phase, 0.0) for phase in PHASES]
        counts = [self.steps, self.makespan, self.exposed, self.batches, self.flops, self.tokens, self.samples]
        return [*phases, *map(float, counts), *self.memory]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> "Sums":
        """The inverse of `row`."""
        rest = row[len(PHASES) :]
        steps, makespan, exposed, batches, flops, tokens, samples = rest[:7]
        return cls(
            phases=dict(zip(PHASES, row, strict=False)),
            steps=int(steps),
            makespan=makespan,
            exposed=exposed,
            batches=int(batches),
            flops=flops,
            tokens=tokens,
            samples=samples,
            memory=(rest[7], rest[8], rest[9], rest[10]),
        )


def time_figures(ranks: Sequence[Sums]) -> dict[str, float]:
    """Seconds a step by phase, and of the rewards a batch; every name in `TIMES`, NaN where nothing was measured.

    Phases are the mean over ranks, which sum to the step. The rewards' figures are those of the rank whose rewards
    took longest, so that exposed and hidden sum to its makespan, which is `REWARD_SECONDS`.

    Args:
        ranks (`Sequence[Sums]`):
            One of each rank, over the same steps.
    """
    steps = ranks[0].steps
    if not steps:
        return dict.fromkeys(TIMES, math.nan)
    figures = {time_of(phase): sum(rank.phases[phase] for rank in ranks) / len(ranks) / steps for phase in PHASES}
    figures[STEP_SECONDS] = sum(figures.values())
    figures |= dict.fromkeys((REWARD_EXPOSED, REWARD_HIDDEN), math.nan)
    slowest = max(ranks, key=lambda rank: rank.makespan)
    if slowest.batches:
        figures[REWARD_SECONDS] = slowest.makespan / slowest.batches
        figures[REWARD_EXPOSED] = slowest.exposed / slowest.batches
        figures[REWARD_HIDDEN] = figures[REWARD_SECONDS] - figures[REWARD_EXPOSED]
    return figures


def perf_figures(ranks: Sequence[Sums], peak_flops: float | None) -> dict[str, float]:
    """Throughput of all ranks together, utilisation, and the memory of the fullest rank; every name in `THROUGHPUT`
    and `MEMORY`, NaN where there is none.

    Both utilisations have the same numerator, the floating-point operations that the policy's forward and backward
    passes need, without recomputation, padding, generation and the other log-probs. `MFU_MODEL` divides by what those
    passes could have done in their own time, `MFU_STEP` in the time of the whole step.

    Args:
        ranks (`Sequence[Sums]`):
            One of each rank, over the same steps.
        peak_flops (`float`, *optional*):
            Of one device in bf16, in FLOP/s.
    """
    steps, wall = ranks[0].steps, sum(rank.wall for rank in ranks) / len(ranks)
    figures = dict.fromkeys((*THROUGHPUT, *MEMORY), math.nan)
    # NaN where there is no GPU: max() of NaNs would be whichever comes first
    for index, name in enumerate(MEMORY):
        known = [rank.memory[index] for rank in ranks if not math.isnan(rank.memory[index])]
        figures[name] = max(known, default=math.nan)
    if not steps or not wall:
        return figures
    seconds = {phase: sum(rank.phases[phase] for rank in ranks) / len(ranks) for phase in PHASES}
    for phase in (FORWARD, BACKWARD, OPTIMIZER, DATA_LOADING):
        figures[f"perf/{phase}_s"] = seconds[phase] / steps
    figures["perf/data_loading_ratio"] = seconds[DATA_LOADING] / wall
    figures["perf/compute_ratio"] = sum(seconds[phase] for phase in COMPUTE_PHASES) / wall
    figures["perf/tokens_per_s"] = sum(rank.tokens for rank in ranks) / wall
    figures["perf/samples_per_s"] = sum(rank.samples for rank in ranks) / wall
    flops = sum(rank.flops for rank in ranks) / len(ranks)
    figures[MFU_MODEL] = mfu(flops, seconds[FORWARD] + seconds[BACKWARD], peak_flops)
    if not math.isnan(figures[MFU_MODEL]):  # a peak that can't be is one for neither
        figures[MFU_STEP] = mfu(flops, wall, peak_flops)
    return figures


def added(ranks: Sequence[Sums], more: Sequence[Sums]) -> list[Sums]:
    """Sums over two stretches of steps, rank by rank; memory is the later one's, its peak the larger."""
    return [
        Sums(
            phases={phase: one.phases[phase] + two.phases[phase] for phase in PHASES},
            steps=one.steps + two.steps,
            makespan=one.makespan + two.makespan,
            exposed=one.exposed + two.exposed,
            batches=one.batches + two.batches,
            flops=one.flops + two.flops,
            tokens=one.tokens + two.tokens,
            samples=one.samples + two.samples,
            memory=(*two.memory[:2], max(one.memory[2], two.memory[2]), two.memory[3]),
        )
        for one, two in zip(ranks, more, strict=True)
    ]
