"""Few of all combinations of parameters."""

from itertools import combinations, product

import pytest


def pairwise(**values):
    """A `parametrize` over rows in which any two values of two parameters stand together at least once."""
    rows = list(product(*values.values()))
    left = set().union(*map(_pairs, rows))
    chosen = []
    while left:
        chosen.append(max(rows, key=lambda row: len(_pairs(row) & left)))
        left -= _pairs(chosen[-1])
    return pytest.mark.parametrize(tuple(values), chosen)


def _pairs(row):
    return set(combinations(enumerate(row), 2))
