"""Sums that become figures: of time, throughput, utilisation and memory, and of all that is kept from one log line to
the next. And the peaks of chips."""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path

from salesrl_trl import names
from salesrl_trl.names import Phase

OPAQUE_PHASES = (Phase.EVALUATION, Phase.CHECKPOINT)
"""An evaluation generates, scores and logs too; all of this counts as evaluation."""
COMPUTE_PHASES = (Phase.WEIGHT_PUSH, Phase.GENERATION, Phase.OLD_LOGPROBS, Phase.REFERENCE_LOGPROBS, Phase.FORWARD,
                  Phase.BACKWARD, Phase.OPTIMIZER)  # fmt: skip
"""Phases in which the accelerator works."""
TIMES = (*(names.time_of(phase) for phase in Phase), names.STEP_SECONDS, names.REWARD_EXPOSED, names.REWARD_HIDDEN)


Sums = Mapping[str, float]
"""Sums of one rank over some steps, by the names in `COLUMNS`: seconds by phase, counts, and GiB at the end."""
STEPS = "steps"
MAKESPAN = "makespan"  # seconds from a batch's first call to its last answer, summed over batches
EXPOSED = "exposed"  # those seconds of the makespan in which the trainer waited
BATCHES = "batches"
FLOPS = "flops"  # of the policy's forward and backward passes; NaN where unknown
TOKENS = "tokens"  # prompt and completion tokens that were trained on, without padding
SAMPLES = "samples"
COLUMNS = (*Phase, STEPS, MAKESPAN, EXPOSED, BATCHES, FLOPS, TOKENS, SAMPLES, *names.MEMORY)
"""The order in which sums travel between ranks."""


def time_figures(ranks: Sequence[Sums]) -> dict[str, float]:
    """Seconds per step and phase, and seconds of the rewards per batch: every name in `TIMES`, NaN if not measured.
    Phases are means over ranks, so that they sum to the step. `REWARD_SECONDS` is the longest makespan of a rank.
    Exposed is the longest wait, perhaps another rank's, where groups go by themselves. Hidden is the rest."""
    steps = ranks[0][STEPS]
    if not steps:
        return dict.fromkeys(TIMES, math.nan)
    figures = {names.time_of(phase): _mean(ranks, phase) / steps for phase in Phase}
    figures[names.STEP_SECONDS] = sum(figures.values())
    figures |= dict.fromkeys((names.REWARD_EXPOSED, names.REWARD_HIDDEN), math.nan)
    slowest = max(ranks, key=itemgetter(MAKESPAN))
    if slowest[BATCHES]:
        figures[names.REWARD_SECONDS] = slowest[MAKESPAN] / slowest[BATCHES]
        figures[names.REWARD_EXPOSED] = max(rank[EXPOSED] for rank in ranks) / slowest[BATCHES]
        figures[names.REWARD_HIDDEN] = figures[names.REWARD_SECONDS] - figures[names.REWARD_EXPOSED]
    return figures


def perf_figures(ranks: Sequence[Sums], peak_flops: float | None) -> dict[str, float]:
    """Throughput of all ranks together, utilisation, and the memory of the fullest rank: every name in `THROUGHPUT`
    and `MEMORY`, NaN where unknown. `peak_flops` is the peak of one device in bf16, in FLOP/s. `MFU_MODEL` divides the
    FLOPs of the policy's forward and backward passes by the peak over their time, `MFU_STEP` over the whole step."""
    seconds = {phase: _mean(ranks, phase) for phase in Phase}
    steps, wall = ranks[0][STEPS], sum(seconds.values())
    figures = dict.fromkeys((*names.THROUGHPUT, *names.MEMORY), math.nan)
    for name in names.MEMORY:
        # Without a GPU there are NaNs, and max() of NaNs would be the first of them.
        figures[name] = max((rank[name] for rank in ranks if not math.isnan(rank[name])), default=math.nan)
    if not steps or not wall:
        return figures
    for phase in names.PERF_PHASES:
        figures[names.perf_of(phase)] = seconds[phase] / steps
    figures[names.DATA_LOADING_RATIO] = seconds[Phase.DATA_LOADING] / wall
    figures[names.COMPUTE_RATIO] = sum(seconds[phase] for phase in COMPUTE_PHASES) / wall
    figures[names.TOKENS_PER_SECOND] = sum(rank[TOKENS] for rank in ranks) / wall
    figures[names.SAMPLES_PER_SECOND] = sum(rank[SAMPLES] for rank in ranks) / wall
    flops = _mean(ranks, FLOPS)
    figures[names.MFU_MODEL] = mfu(flops, seconds[Phase.FORWARD] + seconds[Phase.BACKWARD], peak_flops)
    if not math.isnan(figures[names.MFU_MODEL]):  # An impossible peak gives neither figure.
        figures[names.MFU_STEP] = mfu(flops, wall, peak_flops)
    return figures


def _mean(ranks: Sequence[Sums], name: str) -> float:
    return sum(rank[name] for rank in ranks) / len(ranks)


def mfu(flops: float, seconds: float, peak: float | None) -> float:
    """Model FLOPs utilisation, a share of 1: `flops / (seconds * peak)`. NaN if it is unknown, or above 1, which is
    impossible: peak, time or FLOPs are wrong."""
    if peak is None or not peak > 0 or not seconds > 0:
        return math.nan
    share = flops / (seconds * peak)
    return share if share <= 1 else math.nan


_PEAKS = tomllib.loads(Path(__file__).with_name("peaks.toml").read_text(encoding="utf-8"))["peak"]
PEAK_BF16: dict[str, float] = {peak["name"]: peak["tflops"] for peak in _PEAKS}


def peak_bf16_flops(device_name: str) -> float | None:
    """Peak of a chip in FLOP/s with dense bf16, by `torch.cuda.get_device_name()`; `None` for one that the table does
    not have."""
    name = device_name.removeprefix("NVIDIA ")
    return next((tflops * 1e12 for chip, tflops in PEAK_BF16.items() if re.fullmatch(chip, name)), None)


def percentile(values: Sequence[float], share: float) -> float:
    """The value at or below which a share in (0, 1] of the values lies (nearest rank); 0 without values."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1] if ordered else 0.0


class StepAggregates:
    """The mean of everything that was added since the last `flush`; where `is_largest`, the largest value.

    `flush` returns exactly the names, in their order.
    """

    def __init__(self, figures: Sequence[str]) -> None:
        self._sums = dict.fromkeys(figures, 0.0)
        self._counts = dict.fromkeys(figures, 0.0)

    def add(self, name: str, total: float, count: float) -> None:
        """Add a sum over `count` items; where `is_largest`, one item."""
        if names.is_largest(name):
            self._sums[name], self._counts[name] = max(self._sums[name], total), min(self._counts[name] + count, 1)
            return
        self._sums[name] += total
        self._counts[name] += count

    def flush(self) -> dict[str, float]:
        """The figures, NaN where nothing was added. Starts over."""
        figures = {name: self._sums[name] / count if count else math.nan for name, count in self._counts.items()}
        self._sums, self._counts = dict.fromkeys(figures, 0.0), dict.fromkeys(figures, 0.0)
        return figures
