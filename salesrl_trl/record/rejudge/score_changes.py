"""What another judge would have changed: rewards and advantages of the same completions, before and after.

Pure: no services, no files. Called by `rejudge.__main__`.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from salesrl_trl.record.reader import Recorded
from salesrl_trl.types import Reward
from salesrl_trl.update.advantages import hybrid_advantages


class Baseline(NamedTuple):
    """What an advantage is measured against, by the settings of a run. `scale_rewards` is TRL's, as a text."""

    scale_rewards: str
    hybrid_reference_weight: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreChange:
    """Of one branch, or of all."""

    branch: str
    completions: int
    scored_before: int
    scored_after: int
    mean_before: float
    mean_after: float  # mean reward of those that were scored both times
    rank_correlation: float  # spearman's, of these rewards, in [-1, 1]; NaN where all are equal
    advantage_correlation: float
    mean_shift: float
    sign_flips: float
    """Share of them that changed sign: what was encouraged would have been discouraged, or the reverse."""


def advantages(
    completions: Sequence[Recorded],
    rewards: Sequence[float | None],
    references: Sequence[float | None],
    baseline: Baseline,
) -> list[float | None]:
    """The advantages that training would give, by `hybrid_advantages`; `None` where there is no reward. Ranks share
    steps, batches and groups. `references` are the rewards of the completions' reference answers."""
    batches: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, completion in enumerate(completions):
        batches[completion.step, completion.batch][completion.prompt_group].append(place)
    result: list[float | None] = [None] * len(completions)
    for groups in batches.values():
        size = max(map(len, groups.values()))
        table = torch.full((2, len(groups), size), math.nan, dtype=torch.float64)  # a place that is not there: NaN
        for number, places in enumerate(groups.values()):
            for kind, column in enumerate((rewards, references)):
                for at, place in enumerate(places):
                    if (value := column[place]) is not None:
                        table[kind, number, at] = value
        own, of_references = table.flatten(1)
        weight = baseline.hybrid_reference_weight
        made, _ = hybrid_advantages(own, of_references, size, weight, baseline.scale_rewards)
        for places, row in zip(groups.values(), made.view(len(groups), size).tolist(), strict=True):
            for place, advantage in zip(places, row, strict=False):
                result[place] = None if rewards[place] is None else advantage
    return result


def changes(
    completions: Sequence[Recorded], new: Sequence[Reward], baseline: Baseline
) -> tuple[list[ScoreChange], list[float | None]]:
    """What `new` rewards of recorded completions change: by branch, and of all at the end. With the new advantages."""
    before = [completion.reward for completion in completions]
    after = [reward.value for reward in new]
    made_before = advantages(completions, before, [c.reference_reward for c in completions], baseline)
    made_after = advantages(completions, after, [reward.reference_value for reward in new], baseline)
    columns = [*zip(before, after, made_before, made_after, strict=True)]
    branches = [completion.branch for completion in completions]
    parts = {
        name: [row for branch, row in zip(branches, columns, strict=True) if branch == name]
        for name in sorted(set(branches))
    }
    if len(parts) > 1:
        parts["all"] = columns
    return [_change(name, rows) for name, rows in parts.items()], made_after


def _change(branch: str, rows: Sequence[tuple[float | None, ...]]) -> ScoreChange:
    """The change of rows of (reward before, after, advantage before, after)."""
    both = [[value for value in row if value is not None] for row in rows]
    scored_twice = [row for row in both if len(row) == 4]
    before, after, made_before, made_after = [list(c) for c in zip(*scored_twice, strict=True)] or [[], [], [], []]
    pairs = [*zip(made_before, made_after, strict=True)]
    return ScoreChange(
        branch=branch,
        completions=len(rows),
        scored_before=sum(row[0] is not None for row in rows),
        scored_after=sum(row[1] is not None for row in rows),
        mean_before=_mean(before),
        mean_after=_mean(after),
        rank_correlation=rank_correlation(before, after),
        advantage_correlation=rank_correlation(made_before, made_after),
        mean_shift=_mean([abs(second - first) for first, second in pairs]),
        sign_flips=_mean([float(first * second < 0) for first, second in pairs]),
    )


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's rank correlation. Equal numbers share the mean of their ranks. NaN where one side does not vary."""
    if len(left) < 2 or min(left) == max(left) or min(right) == max(right):
        return math.nan
    ranks = []
    for numbers in (left, right):
        places = defaultdict(list)
        for place, number in enumerate(sorted(numbers)):
            places[number].append(place)
        ranks.append([statistics.fmean(places[number]) for number in numbers])
    return statistics.correlation(*ranks)


def _mean(numbers: Sequence[float]) -> float:
    return statistics.fmean(numbers) if numbers else math.nan
