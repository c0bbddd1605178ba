"""The rewards' figures in a log line: from rewards and a batch's report to names and sums.

Owns which figures there are, how they travel between ranks as a table, and what a table adds to the sums. A metric
keeps its sum and its count until it is logged (`StepAggregates`).
"""

import math
from collections.abc import Sequence

import torch

from salesrl_trl.names import (
    CACHES,
    JUDGE_SECONDS,
    REFERENCE_MISSING,
    REWARD_SECONDS,
    STAGE_SHARES,
    USAGE,
    Stage,
    outcome_of,
    reference_of,
    reward_of,
    saved_by,
    slowest_of,
    stage_of,
    traffic_of,
    usage_of,
)
from salesrl_trl.reward.batch import BatchReport
from salesrl_trl.reward.judge.bias import JudgeBias, bias_sums
from salesrl_trl.reward.service.transport import TRAFFIC
from salesrl_trl.telemetry.aggregates import StepAggregates, percentile
from salesrl_trl.types import Outcome, Reward

OUTCOMES = tuple(Outcome)


def report_names(providers: Sequence[str], services: Sequence[str]) -> tuple[str, ...]:
    """Every name that comes from a batch's report and is summed over ranks, in a fixed order."""
    usage = [usage_of(provider, what) for provider in providers for what in USAGE]
    traffic = [traffic_of(service, what) for service in services for what in (*TRAFFIC, "slots")]
    return (*usage, *traffic, *(saved_by(cache) for cache in CACHES))


def reward_names(branches: Sequence[str]) -> tuple[str, ...]:
    """Every name of `add_rewards` but those of times."""
    per_branch = [name(branch) for branch in branches for name in (reward_of, reference_of)]
    return (*per_branch, *map(outcome_of, OUTCOMES), REFERENCE_MISSING)


def time_names(stages: Sequence[str] = ()) -> tuple[str, ...]:
    """Every name of a time: of `add_report`, then of `add_stages`.

    Args:
        stages (`Sequence[str]`, *optional*, defaults to none):
            The user's stages, beside `Stage`: the reward's `names.stages`.
    """
    every = (*Stage, *stages)
    shares = [stage_of(stage, share) for stage in every for share in STAGE_SHARES]
    return (REWARD_SECONDS, JUDGE_SECONDS, *shares, *map(slowest_of, every))


def encode(rewards: Sequence[Reward], branch_ids: Sequence[int], stages: Sequence[str] = ()) -> torch.Tensor:
    """Per-completion figures that travel between ranks.

    Returns:
        `torch.Tensor` of shape (B, 5 + len(`Stage`) + len(stages)), float64: branch id, index into `OUTCOMES`,
        value, the reference's judge score and its reward, seconds by stage. Columns from `value` onward are NaN when
        missing.
    """
    every = (*Stage, *stages)
    rows = [
        (
            branch_id,
            OUTCOMES.index(reward.outcome),
            math.nan if reward.value is None else reward.value,
            _number(reward.components.get("reference")),
            _number(reward.reference_value),
            *(reward.seconds.get(stage, math.nan) for stage in every),
        )
        for reward, branch_id in zip(rewards, branch_ids, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 5 + len(every))


def values_of(table: torch.Tensor) -> list[float]:
    """The reward of each completion in a table of `encode`; NaN where there is none."""
    return [float(value) for value in table[:, 2]]


def add_rewards(
    aggregates: StepAggregates, table: torch.Tensor, branches: Sequence[str], stages: Sequence[str] = ()
) -> None:
    """Add a gathered table from `encode` to the aggregates.

    Args:
        aggregates (`StepAggregates`):
            Made with `reward_names(branches)` and `time_names(stages)`.
        table (`torch.Tensor`):
            Shape (world size x B, columns of `encode`).
        branches (`Sequence[str]`):
            Branch names by id.
        stages (`Sequence[str]`, *optional*, defaults to none):
            As for `time_names`.
    """
    branch_ids, outcomes, values, references = table[:, :4].unbind(dim=1)  # each (N,)
    for branch_id, branch in enumerate(branches):
        in_branch = branch_ids == branch_id
        for name, column in ((reward_of(branch), values), (reference_of(branch), references)):
            there = in_branch & ~torch.isnan(column)
            aggregates.add(name, column[there].sum().item(), there.sum().item())
    for index, outcome in enumerate(OUTCOMES):
        aggregates.add(outcome_of(outcome), (outcomes == index).sum().item(), len(table))
    judged = outcomes == OUTCOMES.index(Outcome.OK)
    aggregates.add(REFERENCE_MISSING, (judged & torch.isnan(references)).sum().item(), max(judged.sum().item(), 1))
    add_stages(aggregates, table[:, -len(Stage) - len(stages) :], stages)


def add_stages(aggregates: StepAggregates, seconds: torch.Tensor, stages: Sequence[str] = ()) -> None:
    """Add what the stages of a batch took: percentiles over completions, and the split of the slowest one.

    Args:
        aggregates (`StepAggregates`):
            Made with `time_names`.
        seconds (`torch.Tensor`):
            Shape (N, len(`Stage`) + len(stages)), NaN where a completion did not come to a stage.
        stages (`Sequence[str]`, *optional*, defaults to none):
            As for `time_names`.
    """
    every = (*Stage, *stages)
    for index, stage in enumerate(every):
        known = seconds[:, index][~torch.isnan(seconds[:, index])].tolist()
        for name, share in STAGE_SHARES.items():
            aggregates.add(stage_of(stage, name), percentile(known, share), int(bool(known)))
    if not len(seconds):
        return
    split = torch.nan_to_num(seconds)
    parse, rag_8b, rag_32b, *others = split.unbind(dim=1)
    slowest = split[(parse + torch.maximum(rag_8b, rag_32b) + sum(others)).argmax()].tolist()
    for stage, value in zip(every, slowest, strict=True):
        aggregates.add(slowest_of(stage), value, 1)


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


def add_report(aggregates: StepAggregates, bias: JudgeBias, table: torch.Tensor, names: Sequence[str]) -> None:
    """Add gathered reports: times as the slowest rank's, all else summed over ranks, per generation batch.

    Args:
        aggregates (`StepAggregates`):
            Made with `time_names` and `report_names`.
        bias (`JudgeBias`):
            Gets the sums.
        table (`torch.Tensor`):
            Shape (world size, columns of `encode_report`).
        names (`Sequence[str]`):
            From `report_names`.
    """
    times, sums = table[:, :2].max(dim=0).values.tolist(), table[:, 2:].sum(dim=0)
    for name, seconds in zip((REWARD_SECONDS, JUDGE_SECONDS), times, strict=True):
        aggregates.add(name, seconds, 1)
    bias.add(sums[: JudgeBias.SUMS].tolist())
    for name, figure in zip(names, sums[JudgeBias.SUMS :].tolist(), strict=True):
        aggregates.add(name, figure, 1)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
