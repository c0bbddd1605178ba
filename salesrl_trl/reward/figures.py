"""The rewards' figures in a log line.

Owns their names in full, the tables in which they travel between ranks, and the way from a table to the sums of a
line.
"""

import math
from collections.abc import Sequence

import torch

from salesrl_trl.names import (
    CACHES,
    JUDGE_SECONDS,
    REFERENCE_MISSING,
    REWARD_SECONDS,
    RIGHT_DOCUMENT,
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
    """Every name of `add_report` but those of times, in a fixed order."""
    usage = [usage_of(provider, kind) for provider in providers for kind in USAGE]
    traffic = [traffic_of(service, kind) for service in services for kind in (*TRAFFIC, "slots")]
    return (*usage, *traffic, *(saved_by(cache) for cache in CACHES))


def reward_names(branches: Sequence[str]) -> tuple[str, ...]:
    """Every name of `add_rewards` but those of times, in a fixed order."""
    per_branch = [name(branch) for branch in branches for name in (reward_of, reference_of)]
    return (*per_branch, *map(outcome_of, OUTCOMES), REFERENCE_MISSING, RIGHT_DOCUMENT)


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
    """The figures of completions as a table, to be gathered.

    Returns:
        `torch.Tensor` of shape (B, 6 + len(`Stage`) + len(stages)), float64: branch id, index into `OUTCOMES`,
        value, the reference's judge score and its reward, whether the right document was found, seconds by stage.
        Columns from `value` onward are NaN when missing.
    """
    every = (*Stage, *stages)
    rows = [
        (
            branch_id,
            OUTCOMES.index(reward.outcome),
            math.nan if reward.value is None else reward.value,
            _number(reward.components.get("reference")),
            _number(reward.reference_value),
            _number(reward.components.get("right_document")),
            *(reward.seconds.get(stage, math.nan) for stage in every),
        )
        for reward, branch_id in zip(rewards, branch_ids, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 6 + len(every))


def values_of(table: torch.Tensor) -> list[float]:
    """The reward of each completion in a table of `encode`; NaN without one."""
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
    found = table[:, 5]
    aggregates.add(RIGHT_DOCUMENT, found.nansum().item(), (~torch.isnan(found)).sum().item())
    add_stages(aggregates, table[:, -len(Stage) - len(stages) :], stages)


def add_stages(aggregates: StepAggregates, seconds: torch.Tensor, stages: Sequence[str] = ()) -> None:
    """Add the stages' seconds of a batch: percentiles over completions, and the stages of the slowest completion.

    Args:
        aggregates (`StepAggregates`):
            Made with `time_names`.
        seconds (`torch.Tensor`):
            Shape (N, len(`Stage`) + len(stages)), NaN where a completion did not reach a stage.
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
    """A batch's report as a table, to be gathered.

    Returns:
        `torch.Tensor` of shape (1, 2 + `JudgeBias.SUMS` + len(`report_names`)), float64: seconds, judge's seconds, the
        sums for `JudgeBias`, then the figures in the order of `report_names`.
    """
    usage = [float(getattr(each, kind)) for each in report.usage.values() for kind in USAGE]
    traffic = [float(each[kind]) for each in report.traffic.values() for kind in (*TRAFFIC, "slots")]
    saved = [float(report.cache_hits[cache]) for cache in CACHES]
    figures = [report.seconds, report.judge_seconds, *bias_sums(report.records), *usage, *traffic, *saved]
    return torch.tensor([figures], dtype=torch.float64)


def add_report(aggregates: StepAggregates, bias: JudgeBias, table: torch.Tensor, names: Sequence[str]) -> None:
    """Add the gathered reports of a batch. Times are those of the slowest rank; all other figures are sums over ranks.

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
