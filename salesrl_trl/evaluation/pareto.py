"""The points that no other point beats: the Pareto front over the branches' scores.

Pure, standard library only. Knows neither the source of the scores nor the use of the front.
"""

import math
from collections.abc import Mapping, Sequence


def pareto_front(points: Sequence[Mapping[str, float | None]]) -> tuple[int, ...]:
    """Indices of the points that no other point dominates, in the order of the points.

    A point dominates another if it is at least as high in every branch and higher in one. So equal points do not
    dominate each other, and are on the front together or not at all.

    `points`: Scores by branch, higher is better: `[{"fairness": 0.4, "hallucination": 0.3}, ...]`. A point that lacks
    a branch which another point names, or has `None` or NaN for it, cannot be compared and is left out.

    Returns:
        `tuple[int, ...]`: positions in `points`, ascending. Empty where no point can be compared.

    Example:

    ```python
    >>> pareto_front([{"a": 0.1, "b": 0.9}, {"a": 0.5, "b": 0.5}, {"a": 0.4, "b": 0.5}, {"a": 0.9, "b": None}])
    (0, 1)
    ```
    """
    branches = sorted({branch for point in points for branch in point})
    whole = {index: scores for index, point in enumerate(points) if (scores := _scores(point, branches))}
    return tuple(
        index for index, scores in whole.items() if not any(_dominates(other, scores) for other in whole.values())
    )


def _scores(point: Mapping[str, float | None], branches: Sequence[str]) -> tuple[float, ...]:
    """A point's scores in the order of the branches; empty if one is missing."""
    scores = tuple(score for branch in branches if (score := point.get(branch)) is not None and not math.isnan(score))
    return scores if len(scores) == len(branches) else ()


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether `one` is nowhere lower and somewhere higher. If it is nowhere lower, it is higher where they differ."""
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))
