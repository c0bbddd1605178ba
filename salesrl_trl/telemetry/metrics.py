"""Names of the metrics this package adds, and the sums behind them.

Owns the names (in one place, so that a dashboard can rely on them) and the way from per-completion outcomes to
figures. A metric keeps its sum and its count until it is logged, so that batches of unequal size weigh right.
"""

import math
from collections.abc import Sequence

import torch

from salesrl_trl.kl.controller import KLControl
from salesrl_trl.reward.batch import BatchReport
from salesrl_trl.reward.judge.client import JudgeRecord
from salesrl_trl.reward.service.transport import TRAFFIC
from salesrl_trl.types import Outcome, Reward

OUTCOMES = (Outcome.OK, Outcome.INVALID_ACTION, Outcome.JUDGE_INVALID, Outcome.INFRA)
REWARD_SECONDS = "time/reward_s"
JUDGE_SECONDS = "time/judge_s"
SKIPPED_UPDATE = "failures/skipped_update"
REFERENCE_MISSING = "failures/reference_missing"
LENGTH_CORRELATION = "judge/length_correlation"
"""Pearson's correlation of a verdict's score with the length of the answer: what a judge that likes length shows."""
POSITION_GAP = "judge/position_gap"
"""Mean score of candidates that stood before the reference less that of those behind it."""
USAGE = ("verdicts", "prompt_tokens", "completion_tokens", "usd")
"""What is told of each judge provider, per generation batch."""
CACHES = ("answers", "references")
STAGES = ("parse", "rag_8b", "rag_32b", "judge")
"""Of a reward, in their order; the references are asked for beside the 8B answer."""
STAGE_SHARES = {"p50": 0.5, "p95": 0.95, "max": 1.0}
"""Percentiles of a stage's seconds over the completions of a batch that had it."""
FAILURE_REASONS = "failures/reason"
"""Behind it each reason code that has been seen, with the completions it happened to since the last line."""
ALL_KL = "kl"
BASELINE_FALLBACK = "failures/baseline_fallback"
"""Share of groups whose baseline had no reference's reward in it; only where it is to have one."""
SINGLE_SCORED = "failures/single_scored"
"""Share of groups of which one completion alone could be scored: GRPO learns nothing from it."""


def reward_of(branch: str) -> str:
    """Mean reward of a branch's scored completions."""
    return f"reward/{branch}"


def reference_of(branch: str) -> str:
    """Mean judge score of the frozen 32B answers beside a branch's scored completions."""
    return f"reference/{branch}"


def quick_of(branch: str, what: str) -> str:
    """A figure of a quick evaluation: `score`, `truncated`, `length`, `kl` or `beta`."""
    return f"quick_eval/{branch}/{what}"


def stage_of(stage: str, share: str) -> str:
    """Seconds of a stage of the rewards at one of `STAGE_SHARES`."""
    return f"time/{stage}_{share}_s"


STALENESS = "rollout/staleness"
"""Optimizer steps between the weights that sampled a completion and those that are first trained on it: mean."""
STALENESS_MAX = "rollout/staleness_max"
LEFT_OUT = "rollout/left_out"
"""Share of tokens, or completions, that the correction for the sampler's distribution has taken out of the loss."""
BOUNDED = "rollout/bounded"
"""Share whose importance ratio that correction has bounded."""
LARGEST = frozenset((STALENESS_MAX, *(stage_of(stage, "max") for stage in STAGES)))
"""Of several batches the largest counts, not the mean."""


def slowest_of(stage: str) -> str:
    """What a stage took of the completion that was scored last."""
    return f"time/slowest_{stage}_s"


def fraction_of(outcome: Outcome) -> str:
    """Share of completions that ended so."""
    return f"outcome/{outcome.value}"


def usage_of(provider: str, what: str) -> str:
    """One of `USAGE` of a judge provider."""
    return f"judge/{provider}/{what}"


def traffic_of(service: str, what: str) -> str:
    """One of `transport.TRAFFIC` of a service, or its `slots`."""
    return f"services/{service}/{what}"


def saved_by(cache: str) -> str:
    """Calls that a cache saved."""
    return f"cache/{cache}_saved"


def kl_of(branch: str) -> str:
    """A branch's KL as its loss has it, without the coefficient: nats, mean over its tokens on all ranks."""
    return f"kl/{branch}"


def beta_of(branch: str) -> str:
    """Coefficient that a branch's loss had."""
    return f"beta/{branch}"


def kl_names(branches: Sequence[str]) -> tuple[str, ...]:
    """Every name of `add_kl`: beside those above k1, whether the step's KL lay in the band, the share of the run's
    steps of which that is true, the share of tokens whose log-ratio was clamped, tokens per optimizer step, the band's
    edges; and the KL of all branches together, in place of TRL's own `kl`, which one token far off makes infinite."""
    kinds = ("", "_k1", "_in_band", "_share_in_band", "_clamped", "_tokens", "_low", "_high")
    return (ALL_KL, *(name for b in branches for name in (beta_of(b), *(f"{kl_of(b)}{kind}" for kind in kinds))))


def report_names(providers: Sequence[str], services: Sequence[str]) -> tuple[str, ...]:
    """Every name that comes from a batch's report and is summed over ranks, in a fixed order."""
    usage = [usage_of(provider, what) for provider in providers for what in USAGE]
    traffic = [traffic_of(service, what) for service in services for what in (*TRAFFIC, "slots")]
    return (*usage, *traffic, *(saved_by(cache) for cache in CACHES))


def metric_names(branches: Sequence[str]) -> tuple[str, ...]:
    """Every name that comes from rewards, in a fixed order: the same keys on every rank at every step."""
    per_branch = [name(branch) for branch in branches for name in (reward_of, reference_of)]
    stages = [stage_of(stage, share) for stage in STAGES for share in STAGE_SHARES] + [*map(slowest_of, STAGES)]
    return (*per_branch, *(fraction_of(outcome) for outcome in OUTCOMES), REFERENCE_MISSING, SKIPPED_UPDATE,
            SINGLE_SCORED, STALENESS, STALENESS_MAX, LEFT_OUT, BOUNDED, REWARD_SECONDS, JUDGE_SECONDS,
            *stages)  # fmt: skip


def percentile(values: Sequence[float], share: float) -> float:
    """The value at or below which a share of the values lies (nearest rank), 0 of none.

    Args:
        values (`Sequence[float]`):
            In any order.
        share (`float`):
            In (0, 1].
    """
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1] if ordered else 0.0


class Means:
    """Means over whatever was added since the last `flush`, or the largest of it for the names in `LARGEST`.

    Args:
        names (`Sequence[str]`):
            Every name there will be; `flush` returns exactly these.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._largest = frozenset(names) & LARGEST
        self._sums = dict.fromkeys(names, 0.0)
        self._counts = dict.fromkeys(names, 0.0)

    def add(self, name: str, total: float, count: float) -> None:
        """Add a sum over `count` items; of a name in `LARGEST` one item."""
        if name in self._largest:
            self._sums[name], self._counts[name] = max(self._sums[name], total), min(self._counts[name] + count, 1)
            return
        self._sums[name] += total
        self._counts[name] += count

    def flush(self) -> dict[str, float]:
        """The means, NaN where nothing was added; and start over."""
        means = {
            name: self._sums[name] / self._counts[name] if self._counts[name] else math.nan for name in self._sums
        }
        for name in self._sums:
            self._sums[name] = self._counts[name] = 0.0
        return means


def encode(rewards: Sequence[Reward], branch_ids: Sequence[int]) -> torch.Tensor:
    """Per-completion figures that travel between ranks.

    Returns:
        `torch.Tensor` of shape (B, 5 + len(`STAGES`)), float64: branch id, index into `OUTCOMES`, value, the
        reference's judge score and its reward, seconds by stage; from the value on NaN where there is none.
    """
    rows = [
        (
            branch_id,
            OUTCOMES.index(reward.outcome),
            math.nan if reward.value is None else reward.value,
            _number(reward.components.get("reference")),
            _number(reward.reference_value),
            *(reward.seconds.get(stage, math.nan) for stage in STAGES),
        )
        for reward, branch_id in zip(rewards, branch_ids, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 5 + len(STAGES))


def add_rewards(means: Means, table: torch.Tensor, branches: Sequence[str]) -> None:
    """Add a gathered table from `encode` to the means.

    Args:
        means (`Means`):
            Made with `metric_names(branches)`.
        table (`torch.Tensor`):
            Shape (world size x B, columns of `encode`).
        branches (`Sequence[str]`):
            Branch names by id.
    """
    branch_ids, outcomes, values, references = table[:, :4].unbind(dim=1)  # each (N,)
    for branch_id, branch in enumerate(branches):
        in_branch = branch_ids == branch_id
        for name, column in ((reward_of(branch), values), (reference_of(branch), references)):
            there = in_branch & ~torch.isnan(column)
            means.add(name, column[there].sum().item(), there.sum().item())
    for index, outcome in enumerate(OUTCOMES):
        means.add(fraction_of(outcome), (outcomes == index).sum().item(), len(table))
    judged = outcomes == OUTCOMES.index(Outcome.OK)
    means.add(REFERENCE_MISSING, (judged & torch.isnan(references)).sum().item(), max(judged.sum().item(), 1))
    add_stages(means, table[:, -len(STAGES) :])


def add_stages(means: Means, seconds: torch.Tensor) -> None:
    """Add what the stages of a batch took: percentiles over completions, and the split of the slowest one.

    Args:
        means (`Means`):
            Made with `metric_names`.
        seconds (`torch.Tensor`):
            Shape (N, len(`STAGES`)), NaN where a completion did not come to a stage.
    """
    for index, stage in enumerate(STAGES):
        known = seconds[:, index][~torch.isnan(seconds[:, index])].tolist()
        for name, share in STAGE_SHARES.items():
            means.add(stage_of(stage, name), percentile(known, share), int(bool(known)))
    if not len(seconds):
        return
    split = torch.nan_to_num(seconds)
    parse, rag_8b, rag_32b, judge = split.unbind(dim=1)
    slowest = split[(parse + torch.maximum(rag_8b, rag_32b) + judge).argmax()].tolist()
    for stage, value in zip(STAGES, slowest, strict=True):
        means.add(slowest_of(stage), value, 1)


def add_kl(means: Means, totals: Sequence[Sequence[float]], betas: Sequence[float], control: KLControl) -> None:
    """Add one optimizer step's KL.

    Args:
        means (`Means`):
            Made with `kl_names`.
        totals (`Sequence[Sequence[float]]`):
            By branch id, then by `kl.penalty.SUMS`, over all ranks.
        betas (`Sequence[float]`):
            Coefficients that the loss had, by branch id.
        control (`KLControl`):
            Bands, and the shares of steps in them.
    """
    for branch, beta, (kl, k1, clamped, tokens, weight) in zip(control.branches, betas, totals, strict=True):
        name = kl_of(branch.branch)
        means.add(beta_of(branch.branch), beta, 1)
        means.add(f"{name}_tokens", tokens, 1)
        means.add(ALL_KL, kl, weight)
        for kind, total, count in (("", kl, weight), ("_k1", k1, weight), ("_clamped", clamped, tokens)):
            means.add(f"{name}{kind}", total, count)
        if branch.target.has_band and weight and math.isfinite(kl):
            # where there is no KL there are no edges either: TensorBoard draws a band over equal steps alone
            for edge, nats in (("low", branch.target.low), ("high", branch.target.high)):
                means.add(f"{name}_{edge}", nats or 0.0, 1)
            means.add(f"{name}_in_band", float(branch.target.contains(kl / weight)), 1)
        if not math.isnan(branch.share_in_band):
            means.add(f"{name}_share_in_band", branch.share_in_band, 1)


class JudgeBias:
    """What else than quality a judge's scores go along with, over all verdicts since the last `flush`.

    From sums over verdicts of score y and length x: n, sum x, sum y, sum xx, sum yy, sum xy; and the number and the
    sum of scores of candidates that stood first, and of those that stood second.
    """

    SUMS = 10

    def __init__(self) -> None:
        self._sums = torch.zeros(self.SUMS, dtype=torch.float64)

    def add(self, sums: torch.Tensor) -> None:
        """Add the sums of `bias_sums`, over all ranks. Shape (SUMS,)."""
        self._sums += sums.cpu()

    def flush(self) -> dict[str, float]:
        """The figures, NaN where they are undefined; and start over."""
        n, x, y, xx, yy, xy, first, y_first, second, y_second = self._sums.tolist()
        self._sums.zero_()
        spread = (n * xx - x * x) * (n * yy - y * y)
        # A spread that is rounding alone is none: equal scores must not look like a correlation.
        varies = n > 1 and spread > 1e-9 * max(n * xx * n * yy, 1e-12)
        return {
            LENGTH_CORRELATION: (n * xy - x * y) / math.sqrt(spread) if varies else math.nan,
            POSITION_GAP: y_first / first - y_second / second if first and second else math.nan,
        }


def bias_sums(records: Sequence[JudgeRecord]) -> list[float]:
    """The sums of `JudgeBias` over some verdicts."""
    pairs = [(float(record.chars), record.score) for record in records]
    first = [record.score for record in records if record.candidate_first is True]
    second = [record.score for record in records if record.candidate_first is False]
    return [
        len(pairs),
        sum(x for x, _ in pairs),
        sum(y for _, y in pairs),
        sum(x * x for x, _ in pairs),
        sum(y * y for _, y in pairs),
        sum(x * y for x, y in pairs),
        len(first),
        sum(first),
        len(second),
        sum(second),
    ]


def encode_report(report: BatchReport) -> torch.Tensor:
    """A batch's report as it travels between ranks.

    Returns:
        `torch.Tensor` of shape (1, 2 + `JudgeBias.SUMS` + len(`report_names`)), float64: seconds, judge's seconds, the
        sums for `JudgeBias`, then the figures in the order of `report_names`.
    """
    usage = [float(getattr(each, what)) for each in report.usage.values() for what in USAGE]
    traffic = [float(each[what]) for each in report.traffic.values() for what in (*TRAFFIC, "slots")]
    saved = [float(report.cache_hits[cache]) for cache in CACHES]
    figures = [report.seconds, report.judge_seconds, *bias_sums(report.records), *usage, *traffic, *saved]
    return torch.tensor([figures], dtype=torch.float64)


def add_report(means: Means, bias: JudgeBias, table: torch.Tensor, names: Sequence[str]) -> None:
    """Add gathered reports: times as the slowest rank's, all else summed over ranks, per generation batch.

    Args:
        means (`Means`):
            Made with `metric_names` and `report_names`.
        bias (`JudgeBias`):
            Gets the sums.
        table (`torch.Tensor`):
            Shape (world size, columns of `encode_report`).
        names (`Sequence[str]`):
            From `report_names`.
    """
    times, sums = table[:, :2].max(dim=0).values.tolist(), table[:, 2:].sum(dim=0)
    for name, seconds in zip((REWARD_SECONDS, JUDGE_SECONDS), times, strict=True):
        means.add(name, seconds, 1)
    bias.add(sums[: JudgeBias.SUMS])
    for name, figure in zip(names, sums[JudgeBias.SUMS :].tolist(), strict=True):
        means.add(name, figure, 1)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
