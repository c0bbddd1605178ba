"""What another judge would have changed: rewards and advantages of the same completions, before and after.

Pure: no services, no files.
"""

import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

EPSILON = 1e-4
"""Added to the spread, as in TRL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One completion, judged twice."""

    branch: str
    batch: Hashable
    group: Hashable
    """Of its batch."""
    before: float | None
    after: float | None
    """Rewards; `None` where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
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


def advantages(pairs: Sequence[Pair], rewards: Sequence[float | None], scale: str) -> list[float | None]:
    """GRPO's advantages of these rewards: (reward - mean of its group) / (spread + 1e-4).

    Args:
        pairs (`Sequence[Pair]`):
            The completions. Those of a batch are neighbours, and so are those of a group.
        rewards (`Sequence[float | None]`):
            Their rewards.
        scale (`str`):
            TRL's `scale_rewards`: whose standard deviation is the spread, `group` or `batch`. `none`: no division.
    """
    found: list[float | None] = []
    numbered = [*zip(pairs, rewards, strict=True)]
    for _, batch in groupby(numbered, key=lambda each: each[0].batch):
        of_batch = [*batch]
        whole = _spread([reward for _, reward in of_batch])
        for _, group in groupby(of_batch, key=lambda each: each[0].group):
            own = [reward for _, reward in group]
            known = [reward for reward in own if reward is not None]
            mean = statistics.fmean(known) if known else math.nan
            divisor = {"group": _spread(own) + EPSILON, "batch": whole + EPSILON, "none": 1.0}[scale]
            found += [None if reward is None else (reward - mean) / divisor for reward in own]
    return found


def changes(pairs: Sequence[Pair], scale: str) -> list[Change]:
    """By branch, and of all at the end."""
    before = advantages(pairs, [each.before for each in pairs], scale)
    after = advantages(pairs, [each.after for each in pairs], scale)
    numbered = [*zip(pairs, before, after, strict=True)]
    branches = sorted({each.branch for each in pairs})
    parts = [(branch, [each for each in numbered if each[0].branch == branch]) for branch in branches]
    return [_change(branch, part) for branch, part in ([*parts, ("all", numbered)] if len(parts) > 1 else parts)]


def _change(branch: str, numbered: Sequence[tuple[Pair, float | None, float | None]]) -> Change:
    both = [
        (pair.before, pair.after, before, after)
        for pair, before, after in numbered
        if pair.before is not None and pair.after is not None and before is not None and after is not None
    ]
    columns = [list(column) for column in zip(*both, strict=True)] or [[], [], [], []]
    shifts = [abs(after - before) for _, _, before, after in both]
    flips = [before * after < 0 for _, _, before, after in both]
    return Change(
        branch=branch,
        completions=len(numbered),
        scored_before=sum(pair.before is not None for pair, *_ in numbered),
        scored_after=sum(pair.after is not None for pair, *_ in numbered),
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


def _spread(rewards: Sequence[float | None]) -> float:
    known = [reward for reward in rewards if reward is not None]
    return statistics.stdev(known) if len(known) > 1 else 0.0


def _mean(numbers: Sequence[float]) -> float:
    return statistics.fmean(numbers) if numbers else math.nan
