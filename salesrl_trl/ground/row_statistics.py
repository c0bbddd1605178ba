"""The mean of some rows with its interval, the difference of two policies on the same rows, and the Pareto front.

A row is one observation. One without a value is left out and counted, never taken for a number. Intervals are those of
Student's t over rows: a bootstrap of so few rows would be too narrow (docs/how-to/evaluate.md compares the two).
"""

import functools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

CONFIDENCE = 0.95
FEW_ROWS = 10
"""An interval of fewer rows is marked: it rests on the assumption that their values are normally distributed."""
SAME = 1e-9  # rewards that differ by less are equal


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """The mean of the rows that have a value."""

    total: int
    rows: int  # rows with a value
    value: float | None  # their mean; `None` without such rows
    interval: tuple[float, float] | None
    """Its 95 % interval; `None` for fewer than two rows, and for rows that are all equal."""

    @property
    def is_few(self) -> bool:
        return self.rows < FEW_ROWS


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference(Mean):
    """The mean of the second policy's value less the first one's, over rows that both have a value for."""

    p: float | None
    """Probability of a mean at least as far from 0 if there were no difference; `None` without an interval."""
    better: int  # rows in which the second policy has the higher value
    worse: int

    @property
    def equal(self) -> int:
        return self.rows - self.better - self.worse

    @property
    def is_shown(self) -> bool:
        """Whether the interval excludes 0."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


def mean(values: Collection[float]) -> float | None:
    """The mean; `None` without values."""
    return statistics.fmean(values) if values else None


def mean_of(values: Sequence[float]) -> Mean:
    """The mean of the rows. A row without a value is NaN."""
    known = [value for value in values if not math.isnan(value)]
    return Mean(total=len(values), rows=len(known), value=mean(known), interval=_interval(known))


def difference_of(first: Sequence[float], second: Sequence[float]) -> Difference:
    """The difference of two policies, by their values on the same rows; a row without a value is NaN."""
    changes = [after - before for before, after in zip(first, second, strict=True)]
    mean = mean_of(changes)
    known = [0.0 if abs(change) < SAME else change for change in changes if not math.isnan(change)]
    p = None
    if mean.value is not None and mean.interval is not None:
        p = max(1 - share_within(abs(mean.value) / standard_error(known), len(known) - 1), 0.0)
    better, worse = sum(change > 0 for change in known), sum(change < 0 for change in known)
    return Difference(**asdict(mean), p=p, better=better, worse=worse)


def share_within(t: float, freedom: int) -> float:
    """The probability that a value of Student's t distribution lies between -t and t, for a `t` of 0 or more. The
    finite series for whole degrees of freedom, 1 or more: Abramowitz and Stegun, Handbook of Mathematical Functions,
    26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    is_odd, square = freedom % 2, math.cos(angle) ** 2
    term, total = (math.cos(angle) if is_odd else 1.0), 0.0
    for number in range(freedom // 2):
        total += term
        term *= square * (2 * number + 1 + is_odd) / (2 * number + 2 + is_odd)
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if is_odd else total


@functools.cache
def critical(freedom: int) -> float:
    """The t for which 95 % of Student's distribution lie between -t and t, by bisection."""
    low, high = 0.0, 13.0  # with one degree of freedom it is 12.7
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if share_within(middle, freedom) < CONFIDENCE else (low, middle)
    return low


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean of two values or more."""
    return statistics.stdev(values) / math.sqrt(len(values))


def _interval(values: Sequence[float]) -> tuple[float, float] | None:
    if len(values) < 2 or max(values) - min(values) < SAME:
        return None
    mean, reach = statistics.fmean(values), critical(len(values) - 1) * standard_error(values)
    return mean - reach, mean + reach


def pareto_front(points: Sequence[Mapping[str, float | None]]) -> tuple[int, ...]:
    """Indices of the points that no other point dominates, in the order of the points. A point has scores by branch,
    higher is better. It dominates another if it is at least as high in every branch and higher in one. A point that
    lacks a branch which another point names, or has `None` or NaN for it, can't be compared and is left out."""
    branches = sorted({branch for point in points for branch in point})
    whole: dict[int, tuple[float, ...]] = {}
    for index, point in enumerate(points):
        scores = [point.get(branch) for branch in branches]
        known = tuple(score for score in scores if score is not None and not math.isnan(score))
        if known and len(known) == len(branches):
            whole[index] = known
    return tuple(
        index
        for index, scores in whole.items()
        if not any(
            other != scores and all(a >= b for a, b in zip(other, scores, strict=True)) for other in whole.values()
        )
    )
