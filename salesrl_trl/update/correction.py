"""Corrects for the difference between the policy that sampled a completion and the one being trained, by a weight for
each token in the loss.

With x = log pi(token) - log mu(token), for pi the policy at the start of the step and mu the sampler:

    bounded       e^x by token, or e^(sum of x) by completion: TRL's `vllm_importance_sampling_mode` and its bounds
    normalized    the same, divided by its mean over the generation batch
    none          1
    bypass        1, and the loss's own clipped ratio is relative to mu instead of pi: PPO with two policies
    reject        0 where k1 = -x, k2 = x^2 / 2 or k3 = e^x - 1 - x is out of bounds: by token, or its sum, mean or
                  maximum over a completion

These equal verl's `rollout_correction`, except that a rejected token still counts in the loss's normaliser, as with
TRL's masks. A token without log-probs has x = 0.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from accelerate.utils import gather, reduce

from salesrl_trl.errors import ConfigError
from salesrl_trl.kl.penalty import FAILED, MicroBatch, estimate, loss_mask
from salesrl_trl.names import EFFECTIVE_SAMPLES, LEFT_OUT, SAMPLER_KL, SAMPLER_KL_K3
from salesrl_trl.update.ledger import Ledger

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
"""TRL's `vllm_importance_sampling_mode`."""
AHEAD = "token_truncate"
"""The mode with a lookahead. TRL's default, `sequence_mask`, drops whole completions: with old weights mostly long
ones."""
BOUNDED, NORMALIZED, NONE, BYPASS = WEIGHTS = ("bounded", "normalized", "none", "bypass")
REJECTIONS = (*(f"{level}_{k}" for level in ("token", "seq_sum", "seq_mean") for k in ("k1", "k2", "k3")),
              "seq_max_k2", "seq_max_k3")  # fmt: skip
"""verl's `rollout_rs`. `seq_mean_k1` is the geometric mask."""
LARGEST = 20.0
"""In nats: |x| in rejections, as in verl, and in the measured KL."""

RATIO = "importance_sampling_ratio"
SAMPLED = "sampling_per_token_logps"
OLD = "old_per_token_logps"  # TRL's names in a micro-batch
FIGURES = (
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
)
"""TRL's metric names."""


def bounds_of(rejection: str, threshold: object) -> tuple[float, float]:
    """The bounds in nats, both included, of one of `REJECTIONS`. `threshold`: for k1 the bounds of e^k1 around 1, as
    `[low, high]` or `high` for `[1 / high, high]`; otherwise that of k2 or k3. Raises `ConfigError` for others."""
    pair, is_k1 = threshold if isinstance(threshold, list | tuple) else None, rejection.endswith("k1")
    ends = [end for end in pair or [threshold] if type(end) in (int, float) and 0 < end < math.inf]
    if is_k1 and pair is None and ends:
        ends = [1 / ends[0], *ends]
    is_wrong = len(ends) != 1 + is_k1 or (pair is not None and (not is_k1 or len(pair) != 2))
    if is_wrong or (is_k1 and not (ends[0] <= 1 <= ends[1] and ends[0] < ends[1])):  # 1 is on-policy
        expected = "two ratios [low, high] around 1, or one above 1" if is_k1 else "a number above 0, e.g. 1.0e-2"
        raise ConfigError(f"`rollout_correction.reject.{rejection}` is {threshold!r}. Expected {expected}.")
    return (math.log(ends[0]), math.log(ends[1])) if is_k1 else (-math.inf, float(ends[0]))


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionSettings:
    """A correction. `mode`, `low` and `high`: TRL's `vllm_importance_sampling_mode`, `_clip_min` and `_clip_max`.
    `weights`: one of `WEIGHTS`. `reject`: bounds from `bounds_of` by name."""

    mode: str
    low: float | None = None
    high: float | None = None
    weights: str = BOUNDED
    reject: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def log_ratio(logps: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """x of each token in nats, 0 for excluded tokens and without log-probs. All arguments and the result have the
    shape (B, T)."""
    return ((logps - sampled) * mask).nan_to_num(nan=0.0)


def importance_ratio(x: torch.Tensor, settings: CorrectionSettings) -> torch.Tensor:
    """TRL's bounded ratio of policy to sampler: shape (B, T), or (B, 1) for completions. `x`: `log_ratio`, (B, T)."""
    low, high = settings.low, settings.high
    if settings.mode.startswith("sequence"):
        x = x.sum(dim=1, keepdim=True)
    ratio = x.exp()
    if settings.mode.endswith("_mask"):
        beyond = torch.zeros_like(ratio, dtype=torch.bool)
        for bound, outside in ((low, torch.lt), (high, torch.gt)):
            if bound is not None:
                beyond = beyond | outside(ratio, bound)
        return ratio.masked_fill(beyond, 0.0)
    return ratio if low is None and high is None else ratio.clamp(min=low, max=high)


def within(x: torch.Tensor, mask: torch.Tensor, reject: Mapping[str, tuple[float, float]]) -> torch.Tensor:
    """What no rejection applies to: bool, (B, T), or (B, 1) if only whole completions are rejected. `x`: `log_ratio`;
    `mask`: tokens that count; both (B, T)."""
    x, kept = x.clamp(-LARGEST, LARGEST), torch.ones_like(mask[:, :1], dtype=torch.bool)
    for name, (low, high) in reject.items():
        level, _, estimator = name.rpartition("_")
        value = estimate(x, estimator)  # (B, T), 0 for excluded tokens, and never negative for k2 and k3
        if level == "seq_max":
            value = value.amax(dim=1, keepdim=True)
        elif level != "token":
            value = value.sum(dim=1, keepdim=True)
        if level == "seq_mean":
            value = value / mask.sum(dim=1, keepdim=True).clamp(min=1)
        kept = kept & (value >= low) & (value <= high)
    return kept


def counted(ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The tokens (B, T), or for a ratio of shape (B, 1) the completions (B, 1), that count. Bool."""
    return mask.any(dim=1, keepdim=True) if ratio.size(1) == 1 else mask


class SamplerCorrection:
    """The correction of a run, for generation batches whose old log-probs are known."""

    def __init__(self, settings: CorrectionSettings, ledger: Ledger) -> None:
        self.settings, self._ledger = settings, ledger

    def apply_to_batch(self, output: MicroBatch) -> None:
        """Replace TRL's ratio in its output for a generation batch, if it differs; a collective if weights are
        normalised."""
        self._use(output, output[OLD], output[RATIO])

    def _use(self, inputs: MicroBatch, logps: torch.Tensor, ratio: torch.Tensor) -> None:
        """Store the weights where TRL's loss reads them. `logps`: the policy's, (B, T). `ratio`: TRL's."""
        settings, mask, sampled = self.settings, loss_mask(inputs), inputs[SAMPLED]
        if settings.weights == BYPASS:
            inputs[OLD] = torch.where((logps - sampled).isnan(), logps, sampled)
        if settings.weights == NORMALIZED:
            counts = counted(ratio, mask)
            sums = torch.stack([torch.where(counts, ratio, 0.0).sum().double(), counts.sum().double()])
            total, count = reduce(sums, "sum").tolist()
            ratio = ratio * (count / total if total else 1.0)
        elif settings.weights != BOUNDED:
            ratio = torch.ones_like(ratio[:, :1])
        if settings.reject:
            ratio = ratio * within(log_ratio(logps, sampled, mask), mask, settings.reject)
        inputs[RATIO] = ratio

    def effect(self, inputs: MicroBatch, logps: torch.Tensor) -> torch.Tensor:
        """Sums for `record`: shape (8,), float64. `inputs`: with the weights; failed completions are excluded.
        `logps`: the policy's, (B, T)."""
        mask, ratio = loss_mask(inputs), inputs[RATIO]
        apart = logps - inputs[SAMPLED]
        known = mask & ~apart.isnan()
        x = torch.where(known, apart, 0.0).clamp(-LARGEST, LARGEST).double()
        counts = counted(ratio, mask)
        left_out = counts & (ratio == 0)
        if self.settings.weights == BYPASS:  # the weight is the loss's own ratio
            ratio, counts = ratio * x.exp(), mask
        weights = torch.where(counts, ratio, 0.0).double()
        sums = (left_out.sum(), counted(inputs[RATIO], mask).sum(), weights.sum(), (weights**2).sum(), counts.sum(),
                -x.sum(), torch.where(known, estimate(x, "k3"), 0.0).sum(), known.sum())  # fmt: skip
        return torch.stack([each.double() for each in sums])

    def record(self, mode: str, sums: torch.Tensor) -> None:
        """Add the metrics of a generation batch; a collective. `sums`: from `effect`, of all its micro-batches."""
        left_out, of, weight, squares, count, k1, k3, known = reduce(sums, "sum").tolist()
        add = self._ledger.add
        add(mode, LEFT_OUT, left_out, of)
        add(mode, EFFECTIVE_SAMPLES, weight**2 / (count * squares) if squares else 0.0, float(count > 0))
        add(mode, SAMPLER_KL, k1, known)
        add(mode, SAMPLER_KL_K3, k3, known)


class CorrectionAtStep(SamplerCorrection):
    """The correction from log-probs of the training forward pass, one micro-batch at a time."""

    def __init__(self, settings: CorrectionSettings, ledger: Ledger) -> None:
        super().__init__(settings, ledger)
        self.forget()

    def forget(self) -> None:
        self._sums: list[torch.Tensor] = []
        self._highest: list[torch.Tensor] = []

    @property
    def is_due(self) -> bool:
        return bool(self._sums)

    def apply(self, inputs: MicroBatch, logps: torch.Tensor) -> None:
        """Correct a micro-batch, unless it is corrected or the sampler returned no log-probs. `logps`: the policy's,
        shape (B, C)."""
        sampled = inputs.get(SAMPLED)
        if sampled is None or inputs.get(RATIO) is not None:
            return
        mask, logps = loss_mask(inputs), logps.detach()
        ratio = importance_ratio(log_ratio(logps, sampled, mask), self.settings)
        self._use(inputs, logps, ratio)
        apart = (logps - sampled).abs()
        known = mask & ~apart.isnan()
        left = ~inputs[FAILED][:, None] if FAILED in inputs else torch.ones_like(mask[:, :1])  # (B, 1)
        counts = left if ratio.size(1) == 1 else mask
        sums = [torch.where(known, apart, 0.0).sum(), known.sum(), torch.where(counts, ratio, 0.0).sum(), counts.sum()]
        of_trl = torch.stack([figure.double() for figure in sums])
        self._sums.append(torch.cat([of_trl, self.effect(inputs, logps)]))
        highest = [
            torch.where(known, apart, -torch.inf).max(),
            torch.where(counts, -ratio, -torch.inf).max(),
            torch.where(counts, ratio, -torch.inf).max(),
        ]
        self._highest.append(torch.stack([figure.double() for figure in highest]))

    def drain(self) -> dict[str, float]:
        """TRL's metrics of the micro-batches since the last call, by name, and `record` the others; a collective."""
        sums = torch.stack(self._sums).sum(dim=0)
        apart, known, ratio, count = sums[:4]
        furthest, negative_least, largest = torch.stack(self._highest).amax(dim=0)
        self.forget()
        local = torch.stack((
            apart / known.clamp(min=1),
            torch.where(known > 0, furthest, 0.0),
            torch.where(count > 0, -negative_least, 0.0),
            ratio / count.clamp(min=1),
            torch.where(count > 0, largest, 0.0),
        ))  # fmt: skip
        mean, most, least, mean_ratio, most_ratio = gather(local[None]).unbind(dim=1)  # each (world size,)
        figures = (mean.mean(), most.max(), least.min(), mean_ratio.mean(), most_ratio.max())
        self.record("train", sums[4:])
        return dict(zip(FIGURES, (figure.item() for figure in figures), strict=True))
