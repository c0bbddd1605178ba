"""The report's charts as data: thinned lines and stacked bars. `assets/chart.js` draws them.

Owns smoothing, bins, and which layers and bars are shown. A colour is a number of the page's palette, or `"rest"`.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from salesrl_trl.record.view.run_figures import bins
from salesrl_trl.record.view.wording import shown

MAX_BARS = 200  # side by side. With more, a bar would be thinner than three dots.
MAX_POINTS = 360  # of a line: more cannot be told apart
MAX_LAYERS = 9  # of a stack: more colours can't be told apart. The smallest layers become one.
SMOOTHED_FROM = 40  # points of the longest line from which lines have a running mean
SMOOTHED_SHARE = 0.05  # share of the run in the running mean
SPREAD = 20.0
"""Ratio of the largest figure to the median. Beyond it, a linear axis would show the largest figure alone."""
TALL = 3.0  # a bar this many times as high as nearly all others is cut off
MIN_BARS_TO_CUT = 10  # with fewer bars, none is cut off

Series = Mapping[int, float]  # figures by step, ascending
Part = dict[str, object]  # a JSON value: `kind` and what its kind needs


class Line(NamedTuple):
    """A figure over the steps."""

    name: str
    colour: int
    series: Series
    is_dashed: bool = False


def line_chart(
    label: str, lines: Iterable[Line], *, from_zero: bool = False,
    band: tuple[float, float] | None = None, starts: Sequence[int] = (),
) -> Part:  # fmt: skip
    """Figures over the steps, each with a running mean in a long run, over the range `band`. `starts` are marked. The
    axis starts at 0 with `from_zero`, or is logarithmic where one figure would hide the rest."""
    lines = [line for line in lines if line.series]
    longest = max(len(line.series) for line in lines)
    window = round(SMOOTHED_SHARE * longest) if longest > SMOOTHED_FROM else 1
    values = [*(band or ()), *itertools.chain(*(line.series.values() for line in lines))]
    return {
        "kind": "lines",
        "label": f"{label} (strong: mean of {window})" if window > 1 else label,
        "from_zero": from_zero and min(values) >= 0,
        "is_log": from_zero and min(values) > 0 and max(values) > SPREAD * statistics.median(values),
        "band": band and {"name": f"band {band[0]:g} to {band[1]:g}", "low": band[0], "high": band[1]},
        "starts": starts,
        "lines": [
            {
                "name": shown(line.name),
                "colour": line.colour,
                "is_dashed": line.is_dashed,
                "pale": _thinned(line.series) if window > 1 and not line.is_dashed else [],
                "points": _thinned(_running_mean(line.series, window)),
            }
            for line in lines
        ],
    }


def _running_mean(series: Series, window: int) -> Series:
    if window == 1:
        return series
    values = list(series.values())
    last = ((step, values[max(0, at - window) : at]) for at, step in enumerate(series, start=1))
    return {step: math.fsum(part) / len(part) for step, part in last}


def _thinned(series: Series) -> list[tuple[int, float]]:
    """Means of neighbouring steps, with five digits."""
    groups = bins(list(series), MAX_POINTS)
    return [(group[-1], float(f"{statistics.fmean(series[step] for step in group):.5g}")) for group in groups]


def bar_chart(
    label: str, steps: Sequence[int], layers: Mapping[str, Series], *, are_counts: bool = False,
    grey: str = "",
) -> Part:  # fmt: skip
    """Stacked bars over bins of `steps`: sums of counts (`are_counts`), else means. The smallest of many layers, and
    the one named `grey`, are one grey layer at the top."""
    largest = sorted(layers, key=lambda name: -sum(layers[name].values()))[:MAX_LAYERS]
    stack = {name: [layers[name]] for name in layers if name in largest and name != grey}
    if rest := [name for name in layers if name not in stack]:
        stack[rest[0] if len(rest) == 1 else "all other"] = [layers[name] for name in rest]
    groups = bins(steps, MAX_BARS)
    heights = {
        name: [
            sum(series.get(step, 0.0) for series in parts for step in group) / (1 if are_counts else len(group))
            for group in groups
        ]
        for name, parts in stack.items()
    }
    totals = [sum(column) for column in zip(*heights.values(), strict=True)]
    # A few bars that would hide the others, such as a first step with an evaluation, are cut off at the top
    usual = sorted(totals)[math.ceil(0.95 * len(totals)) - 1]
    is_cut = len(totals) >= MIN_BARS_TO_CUT and max(totals) > TALL * usual > 0
    tall = [at for at, total in enumerate(totals) if is_cut and total > TALL * usual]
    gap = statistics.mode([later - earlier for earlier, later in itertools.pairwise(steps)] or [1])
    colours = ["rest" if rest and at == len(stack) - 1 else at for at in range(len(stack))]
    return {
        "kind": "bars",
        "label": label,
        "are_counts": are_counts,
        "edges": [*(group[0] - gap / 2 for group in groups), groups[-1][-1] + gap / 2],
        "top": 1.3 * usual if is_cut else max(totals),
        "notes": [(at, f"{totals[at]:.3g} ↑") for at in tall],
        "layers": [
            {"name": shown(name), "colour": colour, "heights": [float(f"{height:.5g}") for height in column]}
            for (name, column), colour in zip(heights.items(), colours, strict=True)
        ],
    }
