"""The style of the report's pictures: paper, lines, bars, scales and labels.

Owns colours and sizes. Uses matplotlib's object interface: no pyplot, no state, no display. matplotlib is imported
when something is drawn; it comes with the `plots` extra.
"""

import io
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from salesrl_trl.report.figures import bins
from salesrl_trl.report.records import Run
from salesrl_trl.report.words import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

DPI = 160
"""Sharp on a page 8 inches wide, also on paper, with about 50 kB for a picture."""
WIDTH_INCHES = 8.6
HEIGHT_INCHES = 3.1
MOST_BARS = 200
"""Most bars side by side. With more, a bar would be thinner than three dots."""
FEW_POINTS = 40
"""Up to this number each point has a mark. A line through one point cannot be seen."""
SMOOTHED_SHARE = 0.05
"""Share of the run in the running mean of a smoothed line."""
SPREAD = 20.0
"""Ratio of the largest figure to the median. Beyond it, a linear axis would show the largest figure alone."""
LEGEND_CHARS = 90
"""Characters for which five entries in one row have room."""
INK, MUTED, GRID = "#1f2933", "#616e7c", "#e4e7eb"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#b8a800", "#7f4f24")
"""The colours of Okabe and Ito, which colour-blind readers can tell apart, and a few more. Yellow is darker, for white
paper."""
REST_COLOUR = "#b6bec8"
TALL = 3.0
"""A bar this many times as high as nearly all others is cut off."""
FEWEST_TO_CUT = 10
"""With fewer bars, none is cut off."""


def blank(height: float = HEIGHT_INCHES) -> "tuple[Figure, Axes]":
    """An empty figure in the report's style."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8, length=0)
    return figure, axes


def png(figure: "Figure", *axes: "Axes", outside: bool = False, x_label: str = "optimizer step") -> bytes:
    """Add the legend, above the axes or, if it is long, to their right. Return the PNG."""
    axes[0].set_xlabel(x_label)
    for each in axes:
        for label in (each.xaxis.label, each.yaxis.label):
            label.set_fontsize(8.5)
            if label.get_color() == "black":
                label.set_color(MUTED)
    if x_label == "optimizer step":
        whole_ticks(axes[0].xaxis)
    pairs = [pair for each in axes for pair in zip(*each.get_legend_handles_labels(), strict=True)]
    handles, labels = [handle for handle, _ in pairs], [label for _, label in pairs]
    if outside:  # in the order of the stack, from its top
        figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=8)
    elif len(pairs) > 1:
        columns = min(len(pairs), 5 if sum(map(len, labels)) < LEGEND_CHARS else 3)
        figure.legend(handles, labels, loc="outside upper left", frameon=False, fontsize=8, ncols=columns)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    return picture.getvalue()


def whole_ticks(axis: "Axis") -> None:
    """Put ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1))


def line(axes: "Axes", series: Mapping[int, float], colour: str, name: str, *, dashed: bool = False) -> None:
    """Draw a figure over the steps. A long run has a pale line, and a strong line with the running mean."""
    if not series:
        return
    steps, values = list(series), list(series.values())
    window = _window(len(values))
    style = "--" if dashed else "-"
    width, alpha = (1.1, 0.75) if dashed else (1.7, 1.0)
    if window > 1 and not dashed:
        axes.plot(steps, values, color=colour, lw=0.7, alpha=0.3)
    axes.plot(steps, _running_means(values, window), color=colour, lw=width, ls=style, alpha=alpha,
              label=label_of(name), marker=marker_of(series), markersize=3.0)  # fmt: skip


def smoothed(name: str, run: Run) -> str:
    """Name of an axis, with the meaning of its strong lines."""
    window = _window(len(run.steps))
    return f"{name}\n(strong: mean of {window})" if window > 1 else name


def _window(figures_logged: int) -> int:
    return max(1, round(SMOOTHED_SHARE * figures_logged))


def _running_means(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window` - 1 before it."""
    return [statistics.fmean(values[max(0, at - window + 1) : at + 1]) for at in range(len(values))]


def marker_of(series: Mapping[int, float]) -> str:
    """A dot for each point, if there are few of them."""
    return "o" if len(series) <= FEW_POINTS else "None"


def scale(axes: "Axes", series: Mapping[int, float], values: Sequence[float]) -> None:
    """Make the axis logarithmic if one figure would hide the rest. Otherwise let it begin at 0."""
    typical = statistics.median(series.values())
    if min(series.values()) > 0 and max(series.values()) > SPREAD * typical:
        axes.set_yscale("log")
    elif min(values) >= 0:
        top = max(values)
        axes.set_ylim(0, 1.08 * top if top else 1.0)


def stacked(
    axes: "Axes", steps: Sequence[int], layers: Mapping[str, Mapping[int, float]], *, rest: bool, summed: bool
) -> None:
    """Draw stacked bars over bins of steps: sums of counts (`summed`), else means. With `rest` the last layer is
    grey."""
    groups = bins(steps, MOST_BARS)
    gap = statistics.mode([later - earlier for earlier, later in itertools.pairwise(steps)] or [1])
    lefts = [group[0] - gap / 2 for group in groups]
    widths = [group[-1] - group[0] + gap for group in groups]
    bottoms = [0.0] * len(groups)
    colours = [*itertools.islice(itertools.cycle(COLOURS), len(layers) - rest), *[REST_COLOUR] * rest]
    drawn = [0.92 * width for width in widths] if len(groups) <= FEW_POINTS else widths
    for (name, series), colour in zip(layers.items(), colours, strict=True):
        sums = [sum(series.get(step, 0.0) for step in group) for group in groups]
        heights = sums if summed else [total / len(group) for total, group in zip(sums, groups, strict=True)]
        axes.bar(lefts, heights, drawn, bottoms, align="edge", color=colour, lw=0, label=label_of(name))
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xlim(lefts[0], lefts[-1] + widths[-1])
    _cut_off(axes, [left + width / 2 for left, width in zip(lefts, widths, strict=True)], bottoms)


def _cut_off(axes: "Axes", places: Sequence[float], heights: Sequence[float]) -> None:
    """Cut off a few bars that are much higher than the rest, and write their height beside them.

    A first step with an evaluation is such a bar. Uncut, it would hide the others.
    """
    usual = sorted(heights)[math.ceil(0.95 * len(heights)) - 1]
    tall = [(place, height) for place, height in zip(places, heights, strict=True) if height > TALL * usual > 0]
    if not tall or len(heights) < FEWEST_TO_CUT:
        return
    axes.set_ylim(top=1.3 * usual)
    for place, height in tall:
        axes.annotate(
            f" {height:.3g} ↑", (place, 1.3 * usual), va="top", fontsize=7, color=MUTED, annotation_clip=False
        )


def label_of(name: str) -> str:
    """A name for matplotlib: no formula, no hidden label, no letter that the font lacks."""
    from matplotlib import font_manager, ft2font

    font = ft2font.FT2Font(font_manager.findfont("DejaVu Sans"))
    drawn = "".join(char if font.get_char_index(ord(char)) else "?" for char in shown(name))
    return (f" {drawn}" if drawn.startswith("_") else drawn).replace("$", r"\$")
