"""Time, throughput and memory: how the ranks' sums become figures.

Pure arithmetic. `instruments` measures the sums; `names` owns the tags.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from salesrl_trl.names import (
    COMPUTE_RATIO,
    DATA_LOADING_RATIO,
    MEMORY,
    MFU_MODEL,
    MFU_STEP,
    PERF_PHASES,
    REWARD_EXPOSED,
    REWARD_HIDDEN,
    REWARD_SECONDS,
    SAMPLES_PER_SECOND,
    STEP_SECONDS,
    THROUGHPUT,
    TOKENS_PER_SECOND,
    Phase,
    perf_of,
    time_of,
)
from salesrl_trl.telemetry.peaks import mfu

OPAQUE_PHASES = (Phase.EVALUATION, Phase.CHECKPOINT)
"""An evaluation generates, scores and logs too; all of this counts as evaluation."""
COMPUTE_PHASES = (Phase.WEIGHT_PUSH, Phase.GENERATION, Phase.OLD_LOGPROBS, Phase.REFERENCE_LOGPROBS, Phase.FORWARD,
                  Phase.BACKWARD, Phase.OPTIMIZER)  # fmt: skip
"""Phases in which the accelerator works."""
TIMES = (*(time_of(phase) for phase in Phase), STEP_SECONDS, REWARD_EXPOSED, REWARD_HIDDEN)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """Sums of one rank over some steps, as they travel between ranks."""

    phases: Mapping[str, float]
    """Seconds, by the names in `Phase`."""
    steps: int
    """Number of steps."""
    makespan: float
    """Seconds from a batch's first call to its last answer, summed over batches."""
    exposed: float
    """Those seconds of the makespan in which the trainer waited."""
    batches: int
    """Batches that were scored."""
    flops: float
    """FLOPs of the policy's forward and backward passes; NaN where unknown."""
    tokens: float
    """Prompt and completion tokens that were trained on, without padding."""
    samples: float
    """Completions that were trained on."""
    memory: tuple[float, float, float, float]
    """GiB, by the names in `MEMORY`."""

    @property
    def wall(self) -> float:
        """Seconds of the steps together."""
        return sum(self.phases.values())

    def row(self) -> list[float]:
        """As numbers, to be gathered."""
        phases = [self.phases.get(phase, 0.0) for phase in Phase]
        counts = [self.steps, self.makespan, self.exposed, self.batches, self.flops, self.tokens, self.samples]
        return [*phases, *map(float, counts), *self.memory]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> "Sums":
        """The inverse of `row`."""
        rest = row[len(Phase) :]
        steps, makespan, exposed, batches, flops, tokens, samples = rest[:7]
        return cls(
            phases=dict(zip(Phase, row, strict=False)),
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
    """Seconds per step and phase, and seconds of the rewards per batch: every name in `TIMES`, NaN if not measured.

    Phases are means over ranks, so that they sum to the step. The rewards' figures belong to the rank whose rewards
    took longest, so that exposed and hidden sum to its makespan, `REWARD_SECONDS`.

    Args:
        ranks (`Sequence[Sums]`):
            Of each rank, over the same steps.
    """
    steps = ranks[0].steps
    if not steps:
        return dict.fromkeys(TIMES, math.nan)
    figures = {time_of(phase): sum(rank.phases[phase] for rank in ranks) / len(ranks) / steps for phase in Phase}
    figures[STEP_SECONDS] = sum(figures.values())
    figures |= dict.fromkeys((REWARD_EXPOSED, REWARD_HIDDEN), math.nan)
    slowest = max(ranks, key=lambda rank: rank.makespan)
    if slowest.batches:
        figures[REWARD_SECONDS] = slowest.makespan / slowest.batches
        figures[REWARD_EXPOSED] = slowest.exposed / slowest.batches
        figures[REWARD_HIDDEN] = figures[REWARD_SECONDS] - figures[REWARD_EXPOSED]
    return figures


def perf_figures(ranks: Sequence[Sums], peak_flops: float | None) -> dict[str, float]:
    """Throughput of all ranks together, utilisation, and the memory of the fullest rank: every name in `THROUGHPUT`
    and `MEMORY`, NaN where unknown.

    Both utilisations have the same numerator: the FLOPs that the policy's forward and backward passes need, without
    recomputation, padding, generation and the other log-probs. `MFU_MODEL` divides by the peak over the time of these
    passes, `MFU_STEP` by the peak over the time of the whole step.

    Args:
        ranks (`Sequence[Sums]`):
            Of each rank, over the same steps.
        peak_flops (`float`, *optional*):
            Peak of one device in bf16, in FLOP/s.
    """
    steps, wall = ranks[0].steps, sum(rank.wall for rank in ranks) / len(ranks)
    figures = dict.fromkeys((*THROUGHPUT, *MEMORY), math.nan)
    # Without a GPU there are NaNs, and max() of NaNs would be the first of them.
    for index, name in enumerate(MEMORY):
        known = [rank.memory[index] for rank in ranks if not math.isnan(rank.memory[index])]
        figures[name] = max(known, default=math.nan)
    if not steps or not wall:
        return figures
    seconds = {phase: sum(rank.phases[phase] for rank in ranks) / len(ranks) for phase in Phase}
    for phase in PERF_PHASES:
        figures[perf_of(phase)] = seconds[phase] / steps
    figures[DATA_LOADING_RATIO] = seconds[Phase.DATA_LOADING] / wall
    figures[COMPUTE_RATIO] = sum(seconds[phase] for phase in COMPUTE_PHASES) / wall
    figures[TOKENS_PER_SECOND] = sum(rank.tokens for rank in ranks) / wall
    figures[SAMPLES_PER_SECOND] = sum(rank.samples for rank in ranks) / wall
    flops = sum(rank.flops for rank in ranks) / len(ranks)
    figures[MFU_MODEL] = mfu(flops, seconds[Phase.FORWARD] + seconds[Phase.BACKWARD], peak_flops)
    if not math.isnan(figures[MFU_MODEL]):  # An impossible peak gives neither figure.
        figures[MFU_STEP] = mfu(flops, wall, peak_flops)
    return figures


def added(ranks: Sequence[Sums], more: Sequence[Sums]) -> list[Sums]:
    """Sums over two stretches of steps, rank by rank. Memory is that of the later one, with the larger peak of
    both."""
    return [
        Sums(
            phases={phase: one.phases[phase] + two.phases[phase] for phase in Phase},
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
