"""Sums that are kept from one log line to the next. `reward.figures` and `update.ledger` add to them.

An aggregate keeps its sum and its count until it is logged, so that batches of unequal size have the right weights.
"""

import math
from collections.abc import Sequence

from salesrl_trl.names import is_largest


def percentile(values: Sequence[float], share: float) -> float:
    """The value at or below which a share in (0, 1] of the values lies (nearest rank); 0 without values."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1] if ordered else 0.0


class StepAggregates:
    """The mean of everything that was added since the last `flush`; where `is_largest`, the largest value.

    `flush` returns exactly the names, in their order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._largest = frozenset(filter(is_largest, names))
        self._sums = dict.fromkeys(names, 0.0)
        self._counts = dict.fromkeys(names, 0.0)

    def add(self, name: str, total: float, count: float) -> None:
        """Add a sum over `count` items; where `is_largest`, one item."""
        if name in self._largest:
            self._sums[name], self._counts[name] = max(self._sums[name], total), min(self._counts[name] + count, 1)
            return
        self._sums[name] += total
        self._counts[name] += count

    def flush(self) -> dict[str, float]:
        """The figures, NaN where nothing was added. Starts over."""
        figures = {name: self._sums[name] / count if count else math.nan for name, count in self._counts.items()}
        for name in self.names:
            self._sums[name] = self._counts[name] = 0.0
        return figures
