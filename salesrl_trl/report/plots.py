"""The report's pictures: from a run's records to PNG bytes.

Owns how figures are drawn, through matplotlib's object interface: no pyplot, no state, no display. Derives no figure
of its own and writes no file. matplotlib is imported when something is drawn; it comes with the `plots` extra.
"""

import io
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from salesrl_trl.errors import ConfigError
from salesrl_trl.evaluation.pareto import pareto_front
from salesrl_trl.names import (
    FAILURE_REASONS,
    REWARD,
    REWARD_EXPOSED,
    REWARD_HIDDEN,
    STEP_SECONDS,
    Phase,
    beta_of,
    kl_of,
    reference_of,
    reward_of,
    time_of,
)
from salesrl_trl.report import figures
from salesrl_trl.report.records import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

DPI = 160
"""Sharp on a page 8 inches wide, on paper too, at some 50 kB a picture."""
WIDTH_INCHES = 8.6
HEIGHT_INCHES = 3.1
PLANE_INCHES = 4.2
MOST_BARS = 200
"""Bars side by side: more would be thinner than three dots of the picture."""
MOST_LAYERS = 9
"""Colours that a reader still tells apart in one stack; the least of the rest become one layer."""
FEW_POINTS = 40
"""Up to here each point gets a mark of its own: a line through one point cannot be seen."""
SMOOTHED_SHARE = 0.05
"""Part of the run that a smoothed line's mean runs over."""
SPREAD = 20.0
"""From the median to the largest figure. Beyond it a linear axis shows the largest one alone."""
LEGEND_CHARS = 90
"""What five entries in one row have room for."""
LABEL_POINTS = (6.0, 10.0)
"""Width of a digit and height of a label in the picture, in points (1/72 inch), with a little room."""
INK, MUTED, GRID = "#1f2933", "#616e7c", "#e4e7eb"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#b8a800", "#7f4f24")
"""Okabe and Ito's, which the colour-blind tell apart too, and a few more; yellow is darkened for white paper."""
REST_COLOUR = "#b6bec8"
BAND_COLOUR = "#cfe8d5"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """PNG bytes; `None` where there was nothing to draw."""

    reward: bytes | None
    """Reward by branch, with the reference."""
    kl: Mapping[str, bytes]
    """By branch: KL with its band and its coefficient. Only branches with a KL."""
    step_time: bytes | None
    """Step time by phase."""
    reward_time: bytes | None
    """The rewards' makespan, exposed and hidden."""
    failures: bytes | None
    """Failures by reason."""
    quick_evals: bytes | None
    """One branch: score over steps. Two: the plane of their scores, with the front. More: nothing."""


def require_matplotlib() -> None:
    """Say how to install matplotlib where it is missing.

    Raises:
        `ConfigError`: if matplotlib cannot be imported.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"The report's pictures need matplotlib, which cannot be imported ({error}). Install it: "
            "pip install 'salesrl_trl[plots]'"
        ) from error


def draw(run: Run) -> Pictures:
    """Every picture for which the run has figures.

    Args:
        run ([`Run`]):
            The records.

    Raises:
        `ConfigError`: if matplotlib is missing.
    """
    require_matplotlib()
    return Pictures(
        reward=_reward(run),
        kl={branch: _kl(run, branch) for branch in run.branches if run.of(kl_of(branch))},
        step_time=_step_time(run),
        reward_time=_reward_time(run),
        failures=_failures(run),
        quick_evals=_quick_evals(run),
    )


def _reward(run: Run) -> bytes | None:
    tags = [(branch, reward_of(branch), reference_of(branch)) for branch in run.branches if run.of(reward_of(branch))]
    if not tags and not run.of(REWARD):
        return None
    figure, axes = _paper()
    coloured = list(zip(tags, itertools.cycle(COLOURS), strict=False))
    for (branch, reward, _), colour in coloured:
        _line(axes, run.of(reward), colour, branch)
    if len(tags) != 1:
        _line(axes, run.of(REWARD), INK, "all branches")
    for (branch, _, reference), colour in coloured:
        _line(axes, run.of(reference), colour, f"{branch}, reference", dashed=True)
    axes.set_ylabel(_smoothed("mean reward", run))
    return _finished(figure, axes)


def _kl(run: Run, branch: str) -> bytes:
    figure, axes = _paper()
    edges = figures.band(run, branch)
    if edges:
        axes.axhspan(*edges, color=BAND_COLOUR, lw=0, label=f"band {edges[0]:g} to {edges[1]:g}")
    series = run.of(kl_of(branch))
    _line(axes, series, COLOURS[0], "KL")
    _scale(axes, series, [*(edges or ()), *series.values()])
    axes.set_ylabel(_smoothed("KL, nats per token", run))
    betas = run.of(beta_of(branch))
    if not betas:
        return _finished(figure, axes)
    right = axes.twinx()
    right.spines[:].set_visible(False)
    right.step(list(betas), list(betas.values()), where="post", color=COLOURS[1], lw=1.3, label="beta (right)",
               **_marks(betas))  # fmt: skip
    _scale(right, betas, list(betas.values()))
    right.set_ylabel("coefficient beta", color=COLOURS[1])
    right.tick_params(colors=COLOURS[1], labelsize=8, length=0)
    return _finished(figure, axes, right)


TALL = 3.0
"""A bar so many times as high as nearly all others is cut off."""
FEWEST_TO_CUT = 10
"""Of fewer bars none is the exception."""


def _step_time(run: Run) -> bytes | None:
    if not run.of(STEP_SECONDS):
        return None
    layers = {phase: run.of(time_of(phase)) for phase in Phase if any(run.of(time_of(phase)).values())}
    largest = sorted(layers, key=lambda phase: -sum(layers[phase].values()))
    kept = {phase: layers[phase] for phase in layers if phase in largest[:MOST_LAYERS] and phase != Phase.UNACCOUNTED}
    rest = {phase: series for phase, series in layers.items() if phase not in kept}
    named = {phase.replace("_", " "): series for phase, series in kept.items()}
    if rest:
        named[Phase.UNACCOUNTED if set(rest) == {Phase.UNACCOUNTED} else "all other"] = _summed(list(rest.values()))
    figure, axes = _paper()
    _stacked(axes, list(run.of(STEP_SECONDS)), named, rest=bool(rest), summed=False)
    axes.set_ylabel("seconds per step")
    return _finished(figure, axes, outside=True)


def _reward_time(run: Run) -> bytes | None:
    exposed, hidden = run.of(REWARD_EXPOSED), run.of(REWARD_HIDDEN)
    if not exposed and not hidden:
        return None
    figure, axes = _paper()
    named = {"exposed: training waits": exposed, "hidden behind other work": hidden}
    _stacked(axes, sorted({*exposed, *hidden}), named, rest=True, summed=False)
    axes.set_ylabel("rewards, seconds")
    return _finished(figure, axes)


def _failures(run: Run) -> bytes | None:
    reasons = list(figures.failures(run))
    if not reasons:
        return None
    few = len(reasons) <= MOST_LAYERS
    named = {reason: run.of(FAILURE_REASONS + reason) for reason in (reasons if few else reasons[: MOST_LAYERS - 1])}
    if not few:
        named["all other"] = _summed([run.of(FAILURE_REASONS + reason) for reason in reasons[MOST_LAYERS - 1 :]])
    figure, axes = _paper()
    _stacked(axes, run.steps, named, rest=not few, summed=True)
    each = math.ceil(len(run.steps) / MOST_BARS) * figures.interval(run)
    axes.set_ylabel("failures per step" if each == 1 else f"failures per {each} steps")
    _whole(axes.yaxis)
    return _finished(figure, axes, outside=True)


def _quick_evals(run: Run) -> bytes | None:
    evals = [each for each in figures.shown_evals(run) if any(score is not None for score in each.scores.values())]
    branches = sorted({branch for each in evals for branch in each.scores})
    if len(branches) not in (1, 2):
        return None
    figure, axes = _paper(height=PLANE_INCHES if len(branches) == 2 else HEIGHT_INCHES)
    if len(branches) == 1:
        scores = {each.step: score for each in evals if (score := each.scores.get(branches[0])) is not None}
        axes.plot(
            list(scores), list(scores.values()), color=COLOURS[0], lw=1.3, marker="o", ms=4, label=_words(branches[0])
        )
        axes.set_ylabel("score")
        return _finished(figure, axes)
    pairs = [(each.step, each.scores.get(branches[0]), each.scores.get(branches[1])) for each in evals]
    points = [(step, x, y) for step, x, y in pairs if x is not None and y is not None]
    if not points:
        return None
    _plane(axes, points, branches)
    return _finished(figure, axes, x_label=f"score, {_words(branches[0])}")


def _plane(axes: "Axes", points: Sequence[tuple[int, float, float]], branches: Sequence[str]) -> None:
    """Points (step, x, y); the front joined and filled."""
    best = pareto_front([{"x": x, "y": y} for _, x, y in points])
    path = sorted((points[index][1], points[index][2]) for index in best)
    axes.plot([x for x, _ in path], [y for _, y in path], color=COLOURS[1], lw=1, ls="--", zorder=1)
    others = [point for index, point in enumerate(points) if index not in best]
    axes.scatter([x for _, x, _ in others], [y for *_, y in others], s=22, facecolor="white", edgecolor=MUTED,
                 label="beaten by another")  # fmt: skip
    axes.scatter(
        [x for x, _ in path],
        [y for _, y in path],
        s=34,
        color=COLOURS[1],
        label="on the front (numbers are steps)",
        zorder=3,
    )
    axes.margins(0.08, 0.1)
    axes.set_ylabel(f"score, {_words(branches[1])}")
    axes.grid(axis="x", color=GRID, lw=0.8)
    _label(axes, [*(points[index] for index in best), *others])


def _label(axes: "Axes", points: Sequence[tuple[int, float, float]]) -> None:
    """The step beside each point, on a side where there is room; none where there is none. The first have priority."""
    width, height = LABEL_POINTS
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    across, up = 72 * 0.88 * WIDTH_INCHES / (right - left), 72 * 0.78 * PLANE_INCHES / (top - bottom)
    marks = [(x * across, y * up) for _, x, y in points]
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in marks]
    for (x, y), text in _together(points).items():
        for side, below in ((1, 0), (1, 1), (-1, 0), (-1, 1)):
            near, low = x * across + 6 * side, y * up + (-height - 2 if below else 2)
            box = (
                min(near, near + side * width * len(text)),
                low,
                max(near, near + side * width * len(text)),
                low + height,
            )
            if not any(_overlap(box, other) for other in taken):
                taken.append(box)
                axes.annotate(text, (x, y), xytext=(6 * side, -height if below else 3), textcoords="offset points",
                              ha="left" if side > 0 else "right", fontsize=8, color=INK)  # fmt: skip
                break


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    """Of two boxes (left, bottom, right, top)."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _together(points: Sequence[tuple[int, float, float]]) -> dict[tuple[float, float], str]:
    """One label for points in one place: `20, 40`."""
    steps: dict[tuple[float, float], list[str]] = {}
    for step, x, y in points:
        steps.setdefault((x, y), []).append(str(step))
    return {place: ", ".join(each[:3]) + (" …" if len(each) > 3 else "") for place, each in steps.items()}


def _summed(parts: Sequence[Mapping[int, float]]) -> dict[int, float]:
    return {step: sum(part.get(step, 0.0) for part in parts) for step in sorted({step for p in parts for step in p})}


def _paper(height: float = HEIGHT_INCHES) -> "tuple[Figure, Axes]":
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


def _finished(figure: "Figure", *axes: "Axes", outside: bool = False, x_label: str = "optimizer step") -> bytes:
    """The legend, above the axes or, where it is long, to their right; and the PNG."""
    axes[0].set_xlabel(x_label)
    for each in axes:
        for label in (each.xaxis.label, each.yaxis.label):
            label.set_fontsize(8.5)
            if label.get_color() == "black":
                label.set_color(MUTED)
    if x_label == "optimizer step":
        _whole(axes[0].xaxis)
    pairs = [pair for each in axes for pair in zip(*each.get_legend_handles_labels(), strict=True)]
    handles, labels = [handle for handle, _ in pairs], [label for _, label in pairs]
    if outside:  # a stack reads from its top
        figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=8)
    elif len(pairs) > 1:
        columns = min(len(pairs), 5 if sum(map(len, labels)) < LEGEND_CHARS else 3)
        figure.legend(handles, labels, loc="outside upper left", frameon=False, fontsize=8, ncols=columns)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    return picture.getvalue()


def _whole(axis: "Axis") -> None:
    """Ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1))


def _line(axes: "Axes", series: Mapping[int, float], colour: str, name: str, *, dashed: bool = False) -> None:
    """A figure over the steps: pale as it is, and strong as a running mean where the run is long enough."""
    if not series:
        return
    steps, values = list(series), list(series.values())
    window = _window(len(values))
    style = "--" if dashed else "-"
    width, alpha = (1.1, 0.75) if dashed else (1.7, 1.0)
    if window > 1 and not dashed:
        axes.plot(steps, values, color=colour, lw=0.7, alpha=0.3)
    axes.plot(steps, _running_means(values, window), color=colour, lw=width, ls=style, alpha=alpha, label=_words(name),
              **_marks(series))  # fmt: skip


def _smoothed(name: str, run: Run) -> str:
    """An axis' name, with what its strong lines are."""
    window = _window(len(run.steps))
    return f"{name}\n(strong: mean of {window})" if window > 1 else name


def _window(figures_logged: int) -> int:
    return max(1, round(SMOOTHED_SHARE * figures_logged))


def _running_means(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window` - 1 before it."""
    return [statistics.fmean(values[max(0, at - window + 1) : at + 1]) for at in range(len(values))]


def _marks(series: Mapping[int, float]) -> dict[str, Any]:
    return {"marker": "o", "markersize": 3.0} if len(series) <= FEW_POINTS else {}


def _scale(axes: "Axes", series: Mapping[int, float], values: Sequence[float]) -> None:
    """A logarithmic axis where one figure would hide the rest, and from 0 where it would not."""
    typical = statistics.median(series.values())
    if min(series.values()) > 0 and max(series.values()) > SPREAD * typical:
        axes.set_yscale("log")
    elif min(values) >= 0:
        top = max(values)
        axes.set_ylim(0, 1.08 * top if top else 1.0)


def _stacked(
    axes: "Axes", steps: Sequence[int], layers: Mapping[str, Mapping[int, float]], *, rest: bool, summed: bool
) -> None:
    """Bars over the steps, binned: means, or sums where what is drawn is a count. `rest`: the last layer is grey."""
    groups = figures.bins(steps, MOST_BARS)
    gap = statistics.mode([later - earlier for earlier, later in itertools.pairwise(steps)] or [1])
    lefts = [group[0] - gap / 2 for group in groups]
    widths = [group[-1] - group[0] + gap for group in groups]
    bottoms = [0.0] * len(groups)
    colours = [*itertools.islice(itertools.cycle(COLOURS), len(layers) - rest), *[REST_COLOUR] * rest]
    drawn = [0.92 * width for width in widths] if len(groups) <= FEW_POINTS else widths
    for (name, series), colour in zip(layers.items(), colours, strict=True):
        sums = [sum(series.get(step, 0.0) for step in group) for group in groups]
        heights = sums if summed else [total / len(group) for total, group in zip(sums, groups, strict=True)]
        axes.bar(lefts, heights, drawn, bottoms, align="edge", color=colour, lw=0, label=_words(name))
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xlim(lefts[0], lefts[-1] + widths[-1])
    _cut_off(axes, [left + width / 2 for left, width in zip(lefts, widths, strict=True)], bottoms)


def _cut_off(axes: "Axes", places: Sequence[float], heights: Sequence[float]) -> None:
    """Let a few bars that tower over the rest, such as a first step with an evaluation, run out of the picture with
    their height beside them: else nothing of the others could be seen."""
    usual = sorted(heights)[math.ceil(0.95 * len(heights)) - 1]
    tall = [(place, height) for place, height in zip(places, heights, strict=True) if height > TALL * usual > 0]
    if not tall or len(heights) < FEWEST_TO_CUT:
        return
    axes.set_ylim(top=1.3 * usual)
    for place, height in tall:
        axes.annotate(
            f" {height:.3g} ↑", (place, 1.3 * usual), va="top", fontsize=7, color=MUTED, annotation_clip=False
        )


def _words(name: str) -> str:
    """A name as matplotlib writes it out: no formula, no hidden label, no letter that its font lacks."""
    from matplotlib import font_manager, ft2font

    font = ft2font.FT2Font(font_manager.findfont("DejaVu Sans"))
    drawn = "".join(char if font.get_char_index(ord(char)) else "?" for char in figures.shown(name))
    return (f" {drawn}" if drawn.startswith("_") else drawn).replace("$", r"\$")
