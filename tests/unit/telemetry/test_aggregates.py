"""Sums that are kept from one log line to the next."""

import math

import pytest

from salesrl_trl.names import STALENESS_MAX
from salesrl_trl.telemetry.aggregates import StepAggregates, percentile


def test_a_mean_weighs_by_count_and_a_maximum_is_kept_until_the_flush():
    aggregates = StepAggregates(("reward/fairness", STALENESS_MAX))
    for name, total, count in (("reward/fairness", 1.0, 1), ("reward/fairness", 0.5, 3), (STALENESS_MAX, 3, 1)):
        aggregates.add(name, total, count)
    aggregates.add(STALENESS_MAX, 2, 1)
    assert aggregates.flush() == {"reward/fairness": 0.375, STALENESS_MAX: 3}
    assert all(math.isnan(figure) for figure in aggregates.flush().values())


@pytest.mark.parametrize(("share", "value"), [(0.5, 2.0), (0.51, 3.0), (0.75, 3.0), (0.95, 4.0), (1.0, 4.0)])
def test_a_percentile_is_the_value_at_or_below_which_the_share_lies(share, value):
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == value
