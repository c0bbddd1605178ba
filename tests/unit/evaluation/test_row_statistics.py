"""Means with intervals, paired differences and the front, against tables and figures worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from salesrl_trl.ground.row_statistics import critical, difference_of, mean_of, pareto_front, share_within

NAN = math.nan


@pytest.mark.parametrize(
    ("freedom", "tabled"),
    # two-sided 95 % points of Student's t, as printed in tables
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (30, 2.042), (60, 2.000), (120, 1.980)],
)
def test_critical_values_are_those_of_the_tables(freedom, tabled):
    assert critical(freedom) == pytest.approx(tabled, abs=6e-4)


@pytest.mark.parametrize(
    ("t", "freedom", "tabled"),
    # from the same tables: the one-sided 0.9, 0.99 and 0.995 points are the two-sided 0.8, 0.98 and 0.99 ones
    [(1.886, 2, 0.8), (3.747, 4, 0.98), (4.604, 4, 0.99), (2.764, 10, 0.98), (3.169, 10, 0.99), (2.921, 16, 0.99)],
)
def test_shares_are_those_of_the_tables(t, freedom, tabled):
    assert share_within(t, freedom) == pytest.approx(tabled, abs=2e-4)
    assert share_within(0.0, freedom) == 0


def test_a_mean_has_the_interval_of_its_rows_and_counts_those_without_a_value():
    mean = mean_of([1.0, 2.0, NAN, 3.0, 4.0, 5.0])
    # mean 3, variance (4 + 1 + 0 + 1 + 4) / 4 = 2.5, standard error sqrt(2.5 / 5) = 0.7071, times 2.776 = 1.963
    assert (mean.total, mean.rows, mean.value) == (6, 5, 3.0)
    assert mean.interval == pytest.approx((3 - 1.963, 3 + 1.963), abs=1e-3)
    assert mean.is_few


@pytest.mark.parametrize("values", [[], [0.5], [0.5, NAN], [0.5] * 20])
def test_rows_that_do_not_differ_have_no_interval(values):
    assert mean_of(values).interval is None


def test_a_difference_is_taken_row_by_row_over_rows_that_both_have():
    found = difference_of([0.1, 0.5, 0.9, NAN, 0.4], [0.3, 0.9, 0.8, 0.7, NAN])
    # changes +0.2, +0.4, -0.1: mean 1/6, squared deviations 0.00111 + 0.05444 + 0.07111 = 0.12667, variance 0.06333,
    # standard error sqrt(0.06333 / 3) = 0.14530, t = 1.1471, and for two degrees of freedom the share within t is
    # t / sqrt(2 + t^2) = 0.62995
    assert (found.rows, found.total, found.better, found.worse, found.equal) == (3, 5, 2, 1, 0)
    assert found.value == pytest.approx(1 / 6)
    assert found.p == pytest.approx(1 - 0.62995, abs=1e-4)
    assert found.interval == pytest.approx((1 / 6 - 4.303 * 0.1453, 1 / 6 + 4.303 * 0.1453), abs=1e-3)
    assert not found.is_shown


def test_the_interval_excludes_0_where_p_is_below_one_in_twenty():
    spread = [-1.0, 1.0] * 8
    for shift in (0.4, 0.5, 0.55, 0.6, 0.8):
        found = difference_of([0.0] * 16, [each + shift for each in spread])
        assert found.is_shown == (found.p < 0.05)


def test_rounding_is_no_change():
    found = difference_of([0.3, 0.5], [0.1 + 0.2, 0.5])  # 0.30000000000000004
    assert (found.better, found.worse, found.equal, found.interval) == (0, 0, 2, None)


SCORES = st.one_of(st.none(), st.integers(0, 4).map(float), st.just(math.nan))
"""Few values, so that ties are common."""


@given(st.integers(1, 3).flatmap(lambda width: st.lists(st.tuples(*[SCORES] * width), max_size=12)))
def test_a_point_is_on_the_front_if_and_only_if_it_is_whole_and_none_dominates_it(rows):
    points = [dict(zip("abc", row, strict=False)) for row in rows]

    whole = {index: row for index, row in enumerate(rows) if all(x is not None and not math.isnan(x) for x in row)}

    def beats(one, other):
        nowhere_lower = not any(x < y for x, y in zip(one, other, strict=True))
        somewhere_higher = any(x > y for x, y in zip(one, other, strict=True))
        return nowhere_lower and somewhere_higher

    expected = [index for index, row in whole.items() if not any(beats(other, row) for other in whole.values())]
    assert pareto_front(points) == tuple(expected)
    assert bool(expected) == bool(whole)
