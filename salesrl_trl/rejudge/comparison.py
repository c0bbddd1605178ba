"""What another judge would have changed: rewards and advantages of the same completions, before and after.

Pure: no services, no files.
"""

import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from salesrl_trl.update.advantages import hybrid_advantages


@dataclass(frozen=True, slots=True)
class Judgement:
    """Rewards of one completion; `None` where there is none."""

    reward: float | None
    reference: float | None = None
    """Of its row's reference answer."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What an advantage is measured against."""

    scale_rewards: str
    """As in TRL: `group`, `batch` or `none`."""
    hybrid_reference_weight: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One completion, judged twice."""

    branch: str
    batch: Hashable
    group: Hashable
    """Of its batch."""
    before: Judgement
    after: Judgement


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreChange:
    """Of one branch, or of all."""

    branch: str
    completions: int
    scored_before: int
    scored_after: int
    mean_before: float
    mean_after: float
    """Mean reward of those that were scored both times."""
    rank_correlation: float
    """Spearman's, of these rewards, in [-1, 1]; NaN where all are equal."""
    advantage_correlation: float
    """The same of their advantages."""
    mean_shift: float
    """Mean distance of the advantages."""
    sign_flips: float
    """Share of them that changed sign: what was encouraged would have been discouraged, or the reverse."""


def advantages(pairs: Sequence[Pair], judged: Sequence[Judgement], baseline: Baseline) -> list[float | None]:
    """The advantages that training would give, as `hybrid_advantages`; `None` where there is no reward.

    Args:
        pairs (`Sequence[Pair]`):
            The completions.
        judged (`Sequence[Judgement]`):
            Their rewards.
        baseline (`Baseline`):
            The settings of the run.
    """
    batches: dict[Hashable, dict[Hashable, list[int]]] = {}
    for place, pair in enumerate(pairs):
        batches.setdefault(pair.batch, {}).setdefault(pair.group, []).append(place)
    found: list[float | None] = [None] * len(pairs)
    for groups in batches.values():
        size = max(map(len, groups.values()))
        table = torch.full((2, len(groups), size), math.nan, dtype=torch.float64)  # a place that is not there: NaN
        for number, places in enumerate(groups.values()):
            table[0, number, : len(places)] = _column([judged[place].reward for place in places])
            table[1, number, : len(places)] = _column([judged[place].reference for place in places])
        rewards, references = table.flatten(1)
        weight = baseline.hybrid_reference_weight
        numbers, _ = hybrid_advantages(rewards, references, size, weight, baseline.scale_rewards)
        for places, row in zip(groups.values(), numbers.view(len(groups), size).tolist(), strict=True):
            for place, number in zip(places, row, strict=False):
                found[place] = None if judged[place].reward is None else number
    return found


def _column(numbers: Sequence[float | None]) -> torch.Tensor:
    return torch.tensor([math.nan if each is None else each for each in numbers], dtype=torch.float64)


def changes(pairs: Sequence[Pair], baseline: Baseline) -> list[ScoreChange]:
    """By branch, and of all at the end."""
    before = advantages(pairs, [each.before for each in pairs], baseline)
    after = advantages(pairs, [each.after for each in pairs], baseline)
    numbered = [*zip(pairs, before, after, strict=True)]
    branches = sorted({each.branch for each in pairs})
    parts = [(branch, [each for each in numbered if each[0].branch == branch]) for branch in branches]
    return [_change(branch, part) for branch, part in ([*parts, ("all", numbered)] if len(parts) > 1 else parts)]


def _change(branch: str, numbered: Sequence[tuple[Pair, float | None, float | None]]) -> ScoreChange:
    both = [
        (pair.before.reward, pair.after.reward, before, after)
        for pair, before, after in numbered
        if pair.before.reward is not None
        and pair.after.reward is not None
        and before is not None
        and after is not None
    ]
    columns = [list(column) for column in zip(*both, strict=True)] or [[], [], [], []]
    shifts = [abs(after - before) for _, _, before, after in both]
    flips = [before * after < 0 for _, _, before, after in both]
    return ScoreChange(
        branch=branch,
        completions=len(numbered),
        scored_before=sum(pair.before.reward is not None for pair, *_ in numbered),
        scored_after=sum(pair.after.reward is not None for pair, *_ in numbered),
        mean_before=_mean(columns[0]),
        mean_after=_mean(columns[1]),
        rank_correlation=rank_correlation(columns[0], columns[1]),
        advantage_correlation=rank_correlation(columns[2], columns[3]),
        mean_shift=_mean(shifts),
        sign_flips=_mean([float(each) for each in flips]),
    )


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation. Equal numbers share the mean of their ranks. NaN where one side does not vary."""
    if len(one) < 2 or min(one) == max(one) or min(other) == max(other):
        return math.nan
    return statistics.correlation(_ranks(one), _ranks(other))


def _ranks(numbers: Sequence[float]) -> list[float]:
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    ranks = [0.0] * len(numbers)
    first = 0
    for _, equal in groupby(order, key=numbers.__getitem__):
        places = [*equal]
        for place in places:
            ranks[place] = first + (len(places) - 1) / 2
        first += len(places)
    return ranks


def _mean(numbers: Sequence[float]) -> float:
    return statistics.fmean(numbers) if numbers else math.nan
