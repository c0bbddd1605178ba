"""Means over rows with confidence intervals, the difference of two policies on the same rows, and the Pareto front.

A row is one observation. Rows without a value are excluded and counted, never imputed. Intervals use Student's t over
rows, because a bootstrap's of so few rows are too narrow (benchmarks/log/2026-11-29-intervals.md).
"""

import functools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

CONFIDENCE = 0.95
FEW_ROWS = 10
"""Intervals over fewer rows are marked, as they assume normally distributed values."""
SAME = 1e-9  # smaller differences between rewards count as equal


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """The mean over rows with a value."""

    total: int
    rows: int  # rows with a value
    value: float | None  # `None` without such rows
    interval: tuple[float, float] | None
    """The 95 % confidence interval; `None` for fewer than two rows, or if all values are equal."""

    @property
    def is_few(self) -> bool:
        return self.rows < FEW_ROWS


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference(Mean):
    """The mean of the second policy's values minus the first's, over rows with a value for both."""

    p: float | None
    """The two-sided p-value; `None` without an interval."""
    better: int  # rows with a higher value for the second policy
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
    """The mean over rows; rows without a value are NaN."""
    known = [value for value in values if not math.isnan(value)]
    return Mean(total=len(values), rows=len(known), value=mean(known), interval=_interval(known))


def difference_of(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Compare two policies by their values on the same rows; rows without a value are NaN."""
    changes = [after - before for before, after in zip(first, second, strict=True)]
    mean = mean_of(changes)
    known = [0.0 if abs(change) < SAME else change for change in changes if not math.isnan(change)]
    p = None
    if mean.value is not None and mean.interval is not None:
        p = max(1 - share_within(abs(mean.value) / standard_error(known), len(known) - 1), 0.0)
    better, worse = sum(change > 0 for change in known), sum(change < 0 for change in known)
    return Difference(**asdict(mean), p=p, better=better, worse=worse)


def share_within(t: float, freedom: int) -> float:
    """The probability that a Student's t variable lies between -t and t, for `t` >= 0. Uses the finite series for
    integer degrees of freedom: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4."""
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
    """The two-sided 95 % critical value of Student's t distribution, by bisection."""
    low, high = 0.0, 13.0  # 12.7 for one degree of freedom
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if share_within(middle, freedom) < CONFIDENCE else (low, middle)
    return low


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean of at least two values."""
    return statistics.stdev(values) / math.sqrt(len(values))


def _interval(values: Sequence[float]) -> tuple[float, float] | None:
    if len(values) < 2 or max(values) - min(values) < SAME:
        return None
    mean, reach = statistics.fmean(values), critical(len(values) - 1) * standard_error(values)
    return mean - reach, mean + reach


def pareto_front(points: Sequence[Mapping[str, float | None]]) -> tuple[int, ...]:
    """Indices of the non-dominated points, in order. A point maps branches to scores; higher is better. It dominates
    another if it is at least as high in every branch and higher in one. Points without a score for a branch that
    another point has, or with `None` or NaN, can't be compared and are excluded."""
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
