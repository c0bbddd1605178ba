"""A judge's scores beside the length and the position of the answer."""

import math

import pytest

from salesrl_trl.names import LENGTH_CORRELATION, POSITION_GAP
from salesrl_trl.reward.figures import JudgeBias, bias_sums
from salesrl_trl.types import JudgeRecord


def record(score, chars, first=None):
    return JudgeRecord(score=score, chars=chars, candidate_first=first)


def bias_over(*batches):
    """The figures over batches of verdicts, as if each came from a rank of its own."""
    bias = JudgeBias()
    for records in batches:
        bias.add(bias_sums(records))
    return bias.flush()


@pytest.mark.parametrize(
    ("scores", "correlation"),
    [
        ((0.4, 0.3, 0.2, 0.1), -1.0),
        # lengths 10 ... 40: deviations -15, -5, 5, 15; scores: -0.15, 0.15, -0.05, 0.05 (mean 0.25).
        # sum xy = 2.25 - 0.75 - 0.25 + 0.75 = 2.0; sqrt(500 x 0.05) = 5: 0.4
        ((0.1, 0.4, 0.2, 0.3), 0.4),
    ],
)
def test_the_length_correlation_is_pearsons_over_all_ranks(scores, correlation):
    records = [record(score, 10 * (index + 1)) for index, score in enumerate(scores)]
    for batches in ((records,), (records[:1], records[1:])):
        assert bias_over(*batches)[LENGTH_CORRELATION] == pytest.approx(correlation, abs=1e-9)


@pytest.mark.parametrize(
    "records",
    [[], [record(0.1 + 0.2, 10), record(0.3, 20)], [record(0.1, 1_000_000), record(0.9, 1_000_000)]],
    ids=["none", "equal scores", "equal lengths"],
)
def test_where_nothing_varies_there_is_no_correlation(records):
    assert math.isnan(bias_over(records)[LENGTH_CORRELATION])


def test_the_position_gap_is_first_less_second():
    records = [record(0.8, 10, True), record(0.6, 10, True), record(0.5, 10, False), record(0.9, 10)]
    assert bias_over(records)[POSITION_GAP] == pytest.approx(0.2)  # 0.7 - 0.5; the last had nothing beside it
    assert math.isnan(bias_over(records[:2])[POSITION_GAP])
