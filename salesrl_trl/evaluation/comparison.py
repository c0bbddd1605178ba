"""The mean of some rows with its interval, and the difference of two policies on the same rows.

Owns the statistics, by the standard library alone. A row is one observation: its value is the mean reward of its
answers, so that ten answers to a row count no more than one. A row without a value is left out and counted, never
taken for a number.

Intervals and p-values are those of Student's t over rows. With them an interval excludes 0 exactly where p is below
0.05. A bootstrap of so few rows as an evaluation has is too narrow (docs/EVALUATION.md compares the two).
"""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
FEW_ROWS = 10
"""An interval of fewer rows is marked: it rests on the assumption that their values are normally distributed."""
SAME = 1e-9
"""Rewards that differ by less are equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """The mean of the rows that have a value."""

    total: int
    """All rows."""
    rows: int
    """Rows with a value."""
    value: float | None
    """Their mean; `None` without such rows."""
    interval: tuple[float, float] | None
    """Its 95 % interval; `None` for fewer than two rows, and for rows that are all equal."""

    @property
    def is_few(self) -> bool:
        """Whether the interval is of too few rows to rely on."""
        return self.rows < FEW_ROWS

    def lacks(self, least: float) -> bool:
        """Whether fewer than this share of the rows have a value. Without any row nothing is lacking."""
        return self.total > 0 and (not self.rows or self.rows < least * self.total)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference(Mean):
    """The mean of the second policy's value less the first one's, over rows that both have a value for."""

    p: float | None
    """Probability of a mean at least as far from 0 if there were no difference; `None` without an interval."""
    better: int
    """Rows in which the second policy has the higher value."""
    worse: int
    """Rows in which it has the lower one."""

    @property
    def equal(self) -> int:
        """Rows in which both have the same."""
        return self.rows - self.better - self.worse

    @property
    def is_shown(self) -> bool:
        """Whether the interval excludes 0."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


def mean_of(values: Sequence[float]) -> Mean:
    """The mean of the rows. `values`: by row, NaN for one without a value."""
    known = [value for value in values if not math.isnan(value)]
    return Mean(
        total=len(values),
        rows=len(known),
        value=statistics.fmean(known) if known else None,
        interval=_interval(known),
    )


def difference_of(first: Sequence[float], second: Sequence[float]) -> Difference:
    """The difference of two policies.

    `first`, `second`: Their values by row, the same rows in the same order, NaN for one without a value.
    """
    changes = [after - before for before, after in zip(first, second, strict=True)]
    mean = mean_of(changes)
    known = [0.0 if abs(change) < SAME else change for change in changes if not math.isnan(change)]
    p = None
    if mean.value is not None and mean.interval is not None:
        p = max(1 - share_within(abs(mean.value) / _error(known), len(known) - 1), 0.0)
    return Difference(
        total=mean.total,
        rows=mean.rows,
        value=mean.value,
        interval=mean.interval,
        p=p,
        better=sum(change > 0 for change in known),
        worse=sum(change < 0 for change in known),
    )


def share_within(t: float, freedom: int) -> float:
    """The probability that a value of Student's t distribution lies between -t and t.

    The finite series for whole degrees of freedom: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3
    and 26.7.4.

    `t`: 0 or more. `freedom`: Degrees of freedom, 1 or more.
    """
    return _share_within(math.atan(t / math.sqrt(freedom)), freedom)


@functools.cache
def critical(freedom: int) -> float:
    """The t between whose negative and itself lie 95 % of Student's distribution, by bisection of the angle."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _share_within(middle, freedom) < CONFIDENCE else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _share_within(angle: float, freedom: int) -> float:
    """`share_within` of t = sqrt(freedom) tan(angle)."""
    is_odd, square = freedom % 2, math.cos(angle) ** 2
    term, total = (math.cos(angle) if is_odd else 1.0), 0.0
    for number in range(freedom // 2):
        total += term
        term *= square * (2 * number + 1 + is_odd) / (2 * number + 2 + is_odd)
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if is_odd else total


def _error(values: Sequence[float]) -> float:
    """Standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values))


def _interval(values: Sequence[float]) -> tuple[float, float] | None:
    if len(values) < 2 or max(values) - min(values) < SAME:
        return None
    mean, reach = statistics.fmean(values), critical(len(values) - 1) * _error(values)
    return mean - reach, mean + reach
