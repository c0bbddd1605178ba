"""Time, throughput, utilisation and memory: how the ranks' sums, which `instruments` measures, become figures, and the
peaks of chips."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from salesrl_trl.names import (
    COMPUTE_RATIO,
    DATA_LOADING_RATIO,
    GPU_PEAK,
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

OPAQUE_PHASES = (Phase.EVALUATION, Phase.CHECKPOINT)
"""An evaluation generates, scores and logs too; all of this counts as evaluation."""
COMPUTE_PHASES = (Phase.WEIGHT_PUSH, Phase.GENERATION, Phase.OLD_LOGPROBS, Phase.REFERENCE_LOGPROBS, Phase.FORWARD,
                  Phase.BACKWARD, Phase.OPTIMIZER)  # fmt: skip
"""Phases in which the accelerator works."""
TIMES = (*(time_of(phase) for phase in Phase), STEP_SECONDS, REWARD_EXPOSED, REWARD_HIDDEN)


Sums = Mapping[str, float]
"""Sums of one rank over some steps, by the names in `COLUMNS`: seconds by phase, counts, and GiB at the end."""
STEPS = "steps"
MAKESPAN = "makespan"  # seconds from a batch's first call to its last answer, summed over batches
EXPOSED = "exposed"  # those seconds of the makespan in which the trainer waited
BATCHES = "batches"
FLOPS = "flops"  # of the policy's forward and backward passes; NaN where unknown
TOKENS = "tokens"  # prompt and completion tokens that were trained on, without padding
SAMPLES = "samples"
COLUMNS = (*Phase, STEPS, MAKESPAN, EXPOSED, BATCHES, FLOPS, TOKENS, SAMPLES, *MEMORY)
"""The order in which sums travel between ranks."""


def time_figures(ranks: Sequence[Sums]) -> dict[str, float]:
    """Seconds per step and phase, and seconds of the rewards per batch: every name in `TIMES`, NaN if not measured.
    Phases are means over ranks, so that they sum to the step. The rewards' figures belong to the rank whose rewards
    took longest, so that exposed and hidden sum to its makespan, `REWARD_SECONDS`."""
    steps = ranks[0][STEPS]
    if not steps:
        return dict.fromkeys(TIMES, math.nan)
    figures = {time_of(phase): _mean(ranks, phase) / steps for phase in Phase}
    figures[STEP_SECONDS] = sum(figures.values())
    figures |= dict.fromkeys((REWARD_EXPOSED, REWARD_HIDDEN), math.nan)
    slowest = max(ranks, key=lambda rank: rank[MAKESPAN])
    if slowest[BATCHES]:
        figures[REWARD_SECONDS] = slowest[MAKESPAN] / slowest[BATCHES]
        figures[REWARD_EXPOSED] = slowest[EXPOSED] / slowest[BATCHES]
        figures[REWARD_HIDDEN] = figures[REWARD_SECONDS] - figures[REWARD_EXPOSED]
    return figures


def perf_figures(ranks: Sequence[Sums], peak_flops: float | None) -> dict[str, float]:
    """Throughput of all ranks together, utilisation, and the memory of the fullest rank: every name in `THROUGHPUT`
    and `MEMORY`, NaN where unknown. `peak_flops` is the peak of one device in bf16, in FLOP/s. `MFU_MODEL` divides the
    FLOPs of the policy's forward and backward passes by the peak over their time, `MFU_STEP` over the whole step."""
    seconds = {phase: _mean(ranks, phase) for phase in Phase}
    steps, wall = ranks[0][STEPS], sum(seconds.values())
    figures = dict.fromkeys((*THROUGHPUT, *MEMORY), math.nan)
    for name in MEMORY:
        # Without a GPU there are NaNs, and max() of NaNs would be the first of them.
        figures[name] = max((rank[name] for rank in ranks if not math.isnan(rank[name])), default=math.nan)
    if not steps or not wall:
        return figures
    for phase in PERF_PHASES:
        figures[perf_of(phase)] = seconds[phase] / steps
    figures[DATA_LOADING_RATIO] = seconds[Phase.DATA_LOADING] / wall
    figures[COMPUTE_RATIO] = sum(seconds[phase] for phase in COMPUTE_PHASES) / wall
    figures[TOKENS_PER_SECOND] = sum(rank[TOKENS] for rank in ranks) / wall
    figures[SAMPLES_PER_SECOND] = sum(rank[SAMPLES] for rank in ranks) / wall
    flops = _mean(ranks, FLOPS)
    figures[MFU_MODEL] = mfu(flops, seconds[Phase.FORWARD] + seconds[Phase.BACKWARD], peak_flops)
    if not math.isnan(figures[MFU_MODEL]):  # An impossible peak gives neither figure.
        figures[MFU_STEP] = mfu(flops, wall, peak_flops)
    return figures


def added(ranks: Sequence[Sums], more: Sequence[Sums]) -> list[Sums]:
    """Sums over two stretches of steps, rank by rank. Memory is the later one's, with the larger peak of both."""
    return [
        {name: earlier[name] + later[name] for name in COLUMNS}
        | {name: later[name] for name in MEMORY}
        | {GPU_PEAK: max(earlier[GPU_PEAK], later[GPU_PEAK])}
        for earlier, later in zip(ranks, more, strict=True)
    ]


def _mean(ranks: Sequence[Sums], name: str) -> float:
    return sum(rank[name] for rank in ranks) / len(ranks)


def mfu(flops: float, seconds: float, peak: float | None) -> float:
    """Model FLOPs utilisation, a share of 1: `flops / (seconds * peak)`. NaN if it is unknown, or above 1, which is
    impossible: peak, time or FLOPs are wrong."""
    if peak is None or not peak > 0 or not seconds > 0:
        return math.nan
    share = flops / (seconds * peak)
    return share if share <= 1 else math.nan


class Peak(NamedTuple):
    """The peak of a chip: dense bf16 matrix products with sums in fp32."""

    name: str  # regular expression for the whole of `torch.cuda.get_device_name()`, without a leading "NVIDIA "
    flops: float  # FLOP/s. Half of the source's figure where the source only gives it with 2:4 sparsity.
    source: str


HGX_BLACKWELL = "NVIDIA HGX data sheet, FP16/BF16 of 8 GPUs with sparsity"
PEAK_BF16_FLOPS = (
    Peak(r"GB300", 2500e12, "NVIDIA GB300 NVL72 data sheet: 360 PFLOPS of 72 GPUs with sparsity"),
    Peak(r"B300( SXM6 AC)?", 2250e12, f"{HGX_BLACKWELL}: B300 36 PFLOPS"),
    Peak(r"GB200", 2500e12, "NVIDIA GB200 NVL72 data sheet: 360 PFLOPS of 72 GPUs with sparsity"),
    Peak(r"B200", 2250e12, f"{HGX_BLACKWELL}: B200 36 PFLOPS"),
    Peak(r"B100", 1750e12, f"{HGX_BLACKWELL}: B100 28 PFLOPS"),
    Peak(r"GH200 (120GB|480GB|144G HBM3e)", 989.4e12, "NVIDIA GH200 data sheet: 1,979 with sparsity, as the H100 SXM"),
    Peak(r"H200", 989.4e12, "NVIDIA H200 data sheet: SXM 1,979 with sparsity, the chip of the H100 SXM"),
    Peak(r"H200 NVL", 835.5e12, "NVIDIA H200 data sheet: NVL 1,671 with sparsity"),
    Peak(r"H100 \d+GB HBM3", 989.4e12, "NVIDIA H100 white paper, table of SXM5 and PCIe: 989.4 dense"),
    Peak(r"H100 PCIe", 756e12, "NVIDIA H100 white paper, table of SXM5 and PCIe: 756 dense"),
    Peak(r"H100 NVL", 835.5e12, "NVIDIA H100 data sheet: NVL 1,671 with sparsity"),
    # The chips of the H100, with less NVLink and fp64.
    Peak(r"H800", 989.4e12, "vendors' lists: 1,979 with sparsity, as the H100 SXM"),
    Peak(r"H800 PCIe", 756e12, "vendors' lists: 1,513 with sparsity, as the H100 PCIe"),
    Peak(r"H20(-3e)?", 148e12, "vendors' lists, for want of a data sheet on NVIDIA's site: 148 dense"),
    # Not the A100-SXM-64GB, which is another chip.
    Peak(r"A100[- ](SXM4-[48]0GB|PCI[Ee]-[48]0GB|80GB PCIe)", 312e12, "NVIDIA A100 white paper: 312 dense"),
    Peak(r"A800[- ](SXM4-[48]0GB|80GB PCIe)", 312e12, "the chip of the A100, with less NVLink"),
    Peak(r"A30", 165e12, "NVIDIA A30 data sheet: 165 dense"),
    Peak(r"A40", 149.7e12, "NVIDIA A40 data sheet: 149.7 dense"),
    Peak(r"A10", 125e12, "NVIDIA A10 data sheet: 125 dense"),
    Peak(r"A10G", 70e12, "NVIDIA A10G data sheet (the chip of AWS G5): 70 dense"),
    Peak(r"L4", 121e12, "NVIDIA L4 data sheet: 242 with sparsity"),
    Peak(r"L40", 181e12, "NVIDIA L40 data sheet: 181.05 dense"),
    Peak(r"L40S", 362e12, "NVIDIA L40S data sheet: 362.05 dense"),
    Peak(r"RTX A6000", 154.8e12, "NVIDIA RTX A6000 in the GA102 white paper: 154.8 dense"),
    Peak(r"RTX 6000 Ada Generation", 364.25e12, "data sheet: a quarter of its fp8, 1,457 with sparsity"),
    Peak(r"GeForce RTX 3090", 71e12, "NVIDIA GA102 white paper: bf16 with fp32 sums 71 dense"),
    Peak(r"GeForce RTX 4090", 165.2e12, "NVIDIA Ada white paper: bf16 with fp32 sums 165.2 dense"),
    Peak(r"AMD Instinct MI300X( OAM| VF)?", 1307.4e12, "AMD Instinct MI300X data sheet: 1,307.4 dense"),
    Peak(r"AMD Instinct MI325X( OAM| VF)?", 1307.4e12, "AMD Instinct MI325X data sheet: 1,307.4 dense"),
    Peak(r"AMD Instinct MI250X", 191.5e12, "AMD Instinct MI250X data sheet: 383 of two dies; a die is a device"),
)
"""Peaks with a source. A name must match as a whole: a slice of a GPU (MIG, vGPU), a laptop version and an export
version have another peak."""


def peak_bf16_flops(device_name: str) -> float | None:
    """Peak of a chip in FLOP/s with dense bf16, by `torch.cuda.get_device_name()`; `None` for one that the table does
    not have."""
    name = device_name.removeprefix("NVIDIA ")
    return next((peak.flops for peak in PEAK_BF16_FLOPS if re.fullmatch(peak.name, name)), None)
