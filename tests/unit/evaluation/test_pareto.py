"""The front by hand, and against its definition word by word."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from salesrl_trl.evaluation.row_statistics import pareto_front


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], ()),
        ([(1, 1)], (0,)),
        # (2, 2) is higher in both.
        ([(1, 1), (2, 2)], (1,)),
        # As high in a, higher in b.
        ([(1, 1), (1, 2)], (1,)),
        # Each is higher in one.
        ([(1, 3), (2, 2), (3, 1)], (0, 1, 2)),
        # Equal points do not beat each other.
        ([(2, 2), (1, 1), (2, 2)], (0, 2)),
        # Not comparable with anything, though it would win in a.
        ([(9, None), (1, 1)], (1,)),
        ([(9, math.nan), (1, 1)], (1,)),
        ([(None, None)], ()),
        ([(-2, -1), (-1, -2), (-2, -2)], (0, 1)),
    ],
)
def test_two_branches_by_hand(points, expected):
    assert pareto_front([{"a": a, "b": b} for a, b in points]) == expected


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
