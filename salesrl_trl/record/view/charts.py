"""The report's charts: from figures to lines, bars and points with their places in a picture.

Owns scales, ticks, colours, and what each kind of chart draws. Computes no figure of the run. `report_page` calls it,
and `templates/report.html` writes the pictures as SVG, with every name escaped.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from salesrl_trl.record.view.run_figures import bins
from salesrl_trl.record.view.wording import shown

WIDTH, HEIGHT = 860, 290  # of a picture, in its own units. The page scales it to its width.
LEFT, RIGHT, TOP, BOTTOM = 56, 56, 26, 36  # room around the axes for ticks and labels
FRAME = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "floor": HEIGHT - BOTTOM}
"""For the template: the picture's size, and the places of its axes."""
MOST_BARS = 200  # most bars side by side. With more, a bar would be thinner than three dots.
MOST_POINTS = 600  # most points of a line: more cannot be told apart
MOST_LAYERS = 9  # most layers of one stack. More colours can't be told apart: the smallest layers become one.
FEW_POINTS = 40  # up to this number each point has a mark. A line through one point cannot be seen.
SMOOTHED_SHARE = 0.05  # share of the run in the running mean of a smoothed line
SPREAD = 20.0
"""Ratio of the largest figure to the median. Beyond it, a linear axis would show the largest figure alone."""
SMALLEST_RANGE = 1e-300  # figures that differ by less are drawn as equal: floats have no room for ticks between them
TALL = 3.0  # a bar this many times as high as nearly all others is cut off
FEWEST_TO_CUT = 10  # with fewer bars, none is cut off
INK, MUTED, REST_COLOUR, BAND_COLOUR = "#1f2933", "#616e7c", "#b6bec8", "#cfe8d5"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#b8a800", "#7f4f24")
"""The colours of Okabe and Ito, which the colour-blind tell apart, and more. Yellow is darker, for white paper."""

Series = Mapping[int, float]  # figures by step, ascending
Tick = tuple[float, str]  # its place and its words


class Line(NamedTuple):
    """A figure over the steps, as `line_chart` takes it. In a legend its figures don't count."""

    name: str
    colour: str
    series: Series
    is_dashed: bool = False


class Path(NamedTuple):
    """A shape of a picture."""

    d: str
    stroke: str = "none"
    width: float = 1.7
    fill: str = "none"
    opacity: float = 1.0
    dash: str = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A picture with its legend."""

    description: str  # for those who do not see it
    y_label: str
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    paths: Sequence[Path]
    notes: Sequence[Tick] = ()  # words above the axes
    keys: Sequence[Line] = ()


class _Scale:
    """Places the values of an axis from `low` to `high` between two ends of a picture."""

    def __init__(self, low: float, high: float, start: float, end: float, *, is_log: bool = False) -> None:
        if high - low < SMALLEST_RANGE:
            low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
        self.low, self.high, self._start, self._end, self._is_log = low, high, start, end, is_log

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(x) if self._is_log else x for x in (self.low, self.high, value))
        return round(self._start + (value - low) / (high - low) * (self._end - self._start), 1)

    def ticks(self, most: int = 6, *, whole: bool = False) -> list[Tick]:
        """At most about `most` round values, `whole` numbers if wanted."""
        low, high = (math.log10(x) if self._is_log else x for x in (self.low, self.high))
        rough = (high - low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
        step = max(step, 1.0) if whole or self._is_log else step
        numbers = [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
        values = [10.0**n for n in numbers] if self._is_log else numbers
        return [(self(value), f"{value:,.6g}") for value in values]


def _upward(values: Iterable[float], *, from_zero: bool) -> _Scale:
    """The scale of `values`; with `from_zero` from 0, or logarithmic where one figure would hide the rest."""
    values = list(values)
    low, high = min(values), max(values)
    ends = (HEIGHT - BOTTOM, TOP)
    if from_zero and low > 0 and high > SPREAD * statistics.median(values):
        return _Scale(low / 1.2, high * 1.2, *ends, is_log=True)
    if from_zero and low >= 0:
        return _Scale(0.0, 1.08 * high or 1.0, *ends)
    margin = 0.06 * (high - low)
    return _Scale(low - margin, high + margin, *ends)


def line_chart(
    description: str, y_label: str, lines: Sequence[Line], *, from_zero: bool = False,
    band: tuple[float, float] | None = None, starts: Sequence[int] = (),
) -> Chart:  # fmt: skip
    """Figures over the steps, each with a running mean in a long run, over the range `band`. `starts` are marked."""
    lines = [line for line in lines if line.series]
    steps = sorted({step for line in lines for step in line.series})
    margin = 0.02 * (steps[-1] - steps[0])
    x = _Scale(steps[0] - margin, steps[-1] + margin, LEFT, WIDTH - RIGHT)
    y = _upward([*(band or ()), *itertools.chain(*(line.series.values() for line in lines))], from_zero=from_zero)
    points = max(len(line.series) for line in lines)
    window = round(SMOOTHED_SHARE * points) if points > FEW_POINTS else 1

    def polyline(series: Series) -> str:
        groups = bins(list(series), MOST_POINTS)
        points = [(group[-1], statistics.fmean(series[step] for step in group)) for group in groups]
        return "M" + "L".join(f"{x(step)} {y(value)}" for step, value in points)

    paths, keys = [], []
    if band:
        top, bottom = y(band[1]), y(band[0])
        paths.append(Path(f"M{LEFT} {top}H{WIDTH - RIGHT}V{bottom}H{LEFT}Z", fill=BAND_COLOUR))
        keys.append(Line(f"band {band[0]:g} to {band[1]:g}", BAND_COLOUR, {}))
    for line in lines:
        if window > 1 and not line.is_dashed:
            paths.append(Path(polyline(line.series), line.colour, width=0.8, opacity=0.35))
        values = list(line.series.values())
        means = {
            step: statistics.fmean(values[max(0, number - window + 1) : number + 1])
            for number, step in enumerate(line.series)
        }
        dash, width = ("5 4", 1.2) if line.is_dashed else ("none", 1.8)
        paths.append(Path(polyline(means), line.colour, width=width, dash=dash))
        if len(means) <= FEW_POINTS:
            dots = "".join(f"M{x(step)} {y(value)}h0" for step, value in means.items())
            paths.append(Path(dots, line.colour, width=4.6))
        keys.append(Line(shown(line.name), line.colour, {}, line.is_dashed))
    return Chart(
        description=description,
        y_label=f"{y_label} (strong: mean of {window})" if window > 1 else y_label,
        x_ticks=x.ticks(8, whole=True),
        y_ticks=y.ticks(),
        paths=paths,
        notes=[(x(step), "↻") for step in starts if steps[0] <= step <= steps[-1]],
        keys=keys if len(keys) > 1 else (),
    )


def stacked_chart(
    description: str, y_label: str, steps: Sequence[int], layers: Mapping[str, Series], *, summed: bool = False,
    grey: str = "",
) -> Chart:  # fmt: skip
    """Stacked bars over bins of `steps`: sums of counts (`summed`), else means. The smallest of many layers, and the
    one named `grey`, are one grey layer at the top."""
    largest = sorted(layers, key=lambda name: -sum(layers[name].values()))[:MOST_LAYERS]
    kept = {name: [layers[name]] for name in layers if name in largest and name != grey}
    rest = [name for name in layers if name not in kept]
    stack = kept | ({rest[0] if len(rest) == 1 else "all other": [layers[name] for name in rest]} if rest else {})
    colours = [*itertools.islice(itertools.cycle(COLOURS), len(kept)), REST_COLOUR]

    groups = bins(steps, MOST_BARS)
    gap = statistics.mode([later - earlier for earlier, later in itertools.pairwise(steps)] or [1])
    edges = [(group[0] - gap / 2, group[-1] + gap / 2) for group in groups]
    heights = {
        name: [
            sum(series.get(step, 0.0) for series in parts for step in group) / (1 if summed else len(group))
            for group in groups
        ]
        for name, parts in stack.items()
    }
    totals = [sum(column) for column in zip(*heights.values(), strict=True)]
    # A few bars that would hide the others, such as a first step with an evaluation, are cut off at the top
    usual = sorted(totals)[math.ceil(0.95 * len(totals)) - 1]
    tall = [number for number, total in enumerate(totals) if total > TALL * usual > 0]
    tall = tall if len(totals) >= FEWEST_TO_CUT else []
    top = 1.3 * usual if tall else 1.05 * max(totals)
    x = _Scale(edges[0][0], edges[-1][1], LEFT, WIDTH - RIGHT)
    y = _Scale(0.0, top or 1.0, HEIGHT - BOTTOM, TOP)
    spare = 0.04 if len(groups) <= FEW_POINTS else 0.0
    bottoms = [0.0] * len(groups)
    paths = []
    for column, colour in zip(heights.values(), colours, strict=False):
        d = ""
        for number, ((left, right), height) in enumerate(zip(edges, column, strict=True)):
            low, bottoms[number] = bottoms[number], bottoms[number] + height
            if height and low < y.high:
                inset = spare * (right - left)
                ends = y(low), y(min(bottoms[number], y.high))
                d += f"M{x(left + inset)} {ends[0]}V{ends[1]}H{x(right - inset)}V{ends[0]}Z"
        paths.append(Path(d or "M0 0", fill=colour))
    return Chart(
        description=description,
        y_label=y_label,
        x_ticks=x.ticks(8, whole=True),
        y_ticks=y.ticks(whole=summed),
        paths=paths,
        notes=[(x(sum(edges[number]) / 2), f"{totals[number]:.3g} ↑") for number in tall],
        keys=[Line(shown(name), colour, {}) for name, colour in zip(heights, colours, strict=False)],
    )
