"""Computes metrics from sums: time, throughput, utilisation, memory, and everything accumulated between two log lines.
Also holds the table of peak FLOPs."""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path

from salesrl_trl import names
from salesrl_trl.names import Phase

OPAQUE_PHASES = (Phase.EVALUATION, Phase.CHECKPOINT)
"""Phases that own nested ones: an evaluation's generation, scoring and logging count as evaluation."""
COMPUTE_PHASES = (Phase.WEIGHT_PUSH, Phase.GENERATION, Phase.OLD_LOGPROBS, Phase.REFERENCE_LOGPROBS, Phase.FORWARD,
                  Phase.BACKWARD, Phase.OPTIMIZER)  # fmt: skip
"""Phases in which the accelerator works."""
TIMES = (*(names.time_of(phase) for phase in Phase), names.STEP_SECONDS, names.REWARD_EXPOSED, names.REWARD_HIDDEN)


Sums = Mapping[str, float]
"""One rank's sums over some steps, by the names in `COLUMNS`: seconds by phase, counts, and finally GiB."""
STEPS = "steps"
MAKESPAN = "makespan"  # seconds from a batch's first call to its last answer, summed over batches
EXPOSED = "exposed"  # the part of the makespan during which the trainer waited
BATCHES = "batches"
FLOPS = "flops"  # of the policy's forward and backward passes; NaN if unknown
TOKENS = "tokens"  # trained prompt and completion tokens, without padding
SAMPLES = "samples"
COLUMNS = (*Phase, STEPS, MAKESPAN, EXPOSED, BATCHES, FLOPS, TOKENS, SAMPLES, *names.MEMORY)
"""The order in which ranks exchange sums."""


def time_figures(ranks: Sequence[Sums]) -> dict[str, float]:
    """Seconds per step and phase, and reward seconds per batch: every name in `TIMES`, NaN if not measured. Phases are
    means over ranks, so that they sum to the step. `REWARD_SECONDS` is the longest makespan of any rank. Exposed is
    the longest wait, possibly on another rank if groups are chosen individually. Hidden is the rest."""
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
    """Total throughput of all ranks, utilisation, and the memory of the fullest rank: every name in `THROUGHPUT` and
    `MEMORY`, NaN if unknown. `peak_flops` is one device's bf16 peak in FLOP/s. `MFU_MODEL` divides the FLOPs of the
    policy's forward and backward passes by the peak over their time, `MFU_STEP` by the peak over the whole step."""
    seconds = {phase: _mean(ranks, phase) for phase in Phase}
    steps, wall = ranks[0][STEPS], sum(seconds.values())
    figures = dict.fromkeys((*names.THROUGHPUT, *names.MEMORY), math.nan)
    for name in names.MEMORY:
        # NaN without a GPU; max() would return the first NaN
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
    if not math.isnan(figures[names.MFU_MODEL]):  # an impossible peak invalidates both
        figures[names.MFU_STEP] = mfu(flops, wall, peak_flops)
    return figures


def _mean(ranks: Sequence[Sums], name: str) -> float:
    return sum(rank[name] for rank in ranks) / len(ranks)


def mfu(flops: float, seconds: float, peak: float | None) -> float:
    """Model FLOPs utilisation, from 0 to 1: `flops / (seconds * peak)`. NaN if unknown, or above 1, which means that
    peak, time or FLOPs are wrong."""
    if peak is None or not peak > 0 or not seconds > 0:
        return math.nan
    share = flops / (seconds * peak)
    return share if share <= 1 else math.nan


PEAKS = tomllib.loads(Path(__file__).with_name("peaks.toml").read_text(encoding="utf-8"))["peak"]


def peak_bf16_flops(device_name: str) -> float | None:
    """A chip's dense bf16 peak in FLOP/s, by `torch.cuda.get_device_name()`; `None` if it is not in the table."""
    name = device_name.removeprefix("NVIDIA ")
    return next((peak["tflops"] * 1e12 for peak in PEAKS if re.fullmatch(peak["name"], name)), None)


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile for a `share` in (0, 1]; 0 without values."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1] if ordered else 0.0


class StepAggregates:
    """The mean of everything added since the last `flush`; for `is_largest` names, the maximum.

    `flush` returns exactly the given names, in order.
    """

    def __init__(self, figures: Sequence[str]) -> None:
        self._sums = dict.fromkeys(figures, 0.0)
        self._counts = dict.fromkeys(figures, 0.0)

    def add(self, name: str, total: float, count: float) -> None:
        """Add a sum over `count` items; for `is_largest` names, a single item."""
        if names.is_largest(name):
            self._sums[name], self._counts[name] = max(self._sums[name], total), min(self._counts[name] + count, 1)
            return
        self._sums[name] += total
        self._counts[name] += count

    def flush(self) -> dict[str, float]:
        """The metrics, NaN where nothing was added. Resets the sums."""
        figures = {name: self._sums[name] / count if count else math.nan for name, count in self._counts.items()}
        self._sums, self._counts = dict.fromkeys(figures, 0.0), dict.fromkeys(figures, 0.0)
        return figures
