"""Whether a judge's scores depend on more than quality: on an answer's length, or on its position.

Owns the sums that travel between ranks, and the two figures from them. The reward's figures call it.
"""

import math
from collections.abc import Sequence

from salesrl_trl.names import LENGTH_CORRELATION, POSITION_GAP
from salesrl_trl.reward.judge.judge_interface import JudgeRecord


class JudgeBias:
    """How a judge's scores go along with length and position, over all verdicts since the last `flush`.

    Computed from these sums over verdicts of score y and length x: n, sum x, sum y, sum xx, sum yy, sum xy; then the
    number and the sum of scores of candidates that stood first; then both for candidates that stood second.
    """

    SUMS = 10

    def __init__(self) -> None:
        self._sums = [0.0] * self.SUMS

    def add(self, sums: Sequence[float]) -> None:
        """Add the sums of `bias_sums`, over all ranks."""
        self._sums = [total + other for total, other in zip(self._sums, sums, strict=True)]

    def flush(self) -> dict[str, float]:
        """The figures, NaN where they are undefined. Starts over."""
        n, x, y, xx, yy, xy, first, y_first, second, y_second = self._sums
        self._sums = [0.0] * self.SUMS
        spread = (n * xx - x * x) * (n * yy - y * y)
        # Equal scores leave a spread of rounding errors. This must not look like a correlation.
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
