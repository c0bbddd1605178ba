"""The report's pictures: from a run's records to PNG bytes.

Owns the content of each picture; `paper` owns the style. Computes no figure and writes no file.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from salesrl_trl.errors import ConfigError
from salesrl_trl.evaluation.row_statistics import pareto_front
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
from salesrl_trl.report.paper import (
    COLOURS,
    GRID,
    HEIGHT_INCHES,
    INK,
    MOST_BARS,
    MUTED,
    WIDTH_INCHES,
    blank,
    label_of,
    line,
    marker_of,
    png,
    scale,
    smoothed,
    stacked,
    whole_ticks,
)
from salesrl_trl.report.records import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLANE_INCHES = 4.2
MOST_LAYERS = 9
"""Most layers of one stack. More colours can't be told apart: the smallest layers become one."""
LABEL_POINTS = (6.0, 10.0)
"""Width of a digit and height of a label in the picture, in points (1/72 inch), with a little room."""
BAND_COLOUR = "#cfe8d5"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """PNG bytes; `None` if there was nothing to draw."""

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
    """One branch: score over steps. Two branches: the plane of their scores, with the front. More branches: `None`."""


def require_matplotlib() -> None:
    """Check that matplotlib is installed.

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
    """Draw every picture for which the run has figures.

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
    figure, axes = blank()
    coloured = list(zip(tags, itertools.cycle(COLOURS), strict=False))
    for (branch, reward, _), colour in coloured:
        line(axes, run.of(reward), colour, branch)
    if len(tags) != 1:
        line(axes, run.of(REWARD), INK, "all branches")
    for (branch, _, reference), colour in coloured:
        line(axes, run.of(reference), colour, f"{branch}, reference", dashed=True)
    axes.set_ylabel(smoothed("mean reward", run))
    return png(figure, axes)


def _kl(run: Run, branch: str) -> bytes:
    figure, axes = blank()
    edges = figures.band(run, branch)
    if edges:
        axes.axhspan(*edges, color=BAND_COLOUR, lw=0, label=f"band {edges[0]:g} to {edges[1]:g}")
    series = run.of(kl_of(branch))
    line(axes, series, COLOURS[0], "KL")
    scale(axes, series, [*(edges or ()), *series.values()])
    axes.set_ylabel(smoothed("KL, nats per token", run))
    betas = run.of(beta_of(branch))
    if not betas:
        return png(figure, axes)
    right = axes.twinx()
    right.spines[:].set_visible(False)
    right.step(list(betas), list(betas.values()), where="post", color=COLOURS[1], lw=1.3, label="beta (right)",
               marker=marker_of(betas), markersize=3.0)  # fmt: skip
    scale(right, betas, list(betas.values()))
    right.set_ylabel("coefficient beta", color=COLOURS[1])
    right.tick_params(colors=COLOURS[1], labelsize=8, length=0)
    return png(figure, axes, right)


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
    figure, axes = blank()
    stacked(axes, list(run.of(STEP_SECONDS)), named, rest=bool(rest), summed=False)
    axes.set_ylabel("seconds per step")
    return png(figure, axes, outside=True)


def _reward_time(run: Run) -> bytes | None:
    exposed, hidden = run.of(REWARD_EXPOSED), run.of(REWARD_HIDDEN)
    if not exposed and not hidden:
        return None
    figure, axes = blank()
    named = {"exposed: training waits": exposed, "hidden behind other work": hidden}
    stacked(axes, sorted({*exposed, *hidden}), named, rest=True, summed=False)
    axes.set_ylabel("rewards, seconds")
    return png(figure, axes)


def _failures(run: Run) -> bytes | None:
    reasons = list(figures.failures(run))
    if not reasons:
        return None
    few = len(reasons) <= MOST_LAYERS
    named = {reason: run.of(FAILURE_REASONS + reason) for reason in (reasons if few else reasons[: MOST_LAYERS - 1])}
    if not few:
        named["all other"] = _summed([run.of(FAILURE_REASONS + reason) for reason in reasons[MOST_LAYERS - 1 :]])
    figure, axes = blank()
    stacked(axes, run.steps, named, rest=not few, summed=True)
    each = math.ceil(len(run.steps) / MOST_BARS) * figures.interval(run)
    axes.set_ylabel("failures per step" if each == 1 else f"failures per {each} steps")
    whole_ticks(axes.yaxis)
    return png(figure, axes, outside=True)


def _quick_evals(run: Run) -> bytes | None:
    evals = [each for each in figures.shown_evals(run) if any(score is not None for score in each.scores.values())]
    branches = sorted({branch for each in evals for branch in each.scores})
    if len(branches) not in (1, 2):
        return None
    figure, axes = blank(height=PLANE_INCHES if len(branches) == 2 else HEIGHT_INCHES)
    if len(branches) == 1:
        scores = {each.step: score for each in evals if (score := each.scores.get(branches[0])) is not None}
        axes.plot(
            list(scores),
            list(scores.values()),
            color=COLOURS[0],
            lw=1.3,
            marker="o",
            ms=4,
            label=label_of(branches[0]),
        )
        axes.set_ylabel("score")
        return png(figure, axes)
    pairs = [(each.step, each.scores.get(branches[0]), each.scores.get(branches[1])) for each in evals]
    points = [(step, x, y) for step, x, y in pairs if x is not None and y is not None]
    if not points:
        return None
    _plane(axes, points, branches)
    return png(figure, axes, x_label=f"score, {label_of(branches[0])}")


def _plane(axes: "Axes", points: Sequence[tuple[int, float, float]], branches: Sequence[str]) -> None:
    """Draw points (step, x, y). Those on the front are joined and filled."""
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
    axes.set_ylabel(f"score, {label_of(branches[1])}")
    axes.grid(axis="x", color=GRID, lw=0.8)
    _label(axes, [*(points[index] for index in best), *others])


def _label(axes: "Axes", points: Sequence[tuple[int, float, float]]) -> None:
    """Write the step beside each point, on a side with room, if there is one. The first points have priority."""
    width, height = LABEL_POINTS
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    across, up = 72 * 0.88 * WIDTH_INCHES / (right - left), 72 * 0.78 * PLANE_INCHES / (top - bottom)
    places = [(x * across, y * up) for _, x, y in points]
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in places]
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
    """Whether two boxes (left, bottom, right, top) overlap."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _together(points: Sequence[tuple[int, float, float]]) -> dict[tuple[float, float], str]:
    """One label for points at one place: `20, 40`."""
    steps: dict[tuple[float, float], list[str]] = {}
    for step, x, y in points:
        steps.setdefault((x, y), []).append(str(step))
    return {place: ", ".join(each[:3]) + (" …" if len(each) > 3 else "") for place, each in steps.items()}


def _summed(parts: Sequence[Mapping[int, float]]) -> dict[int, float]:
    return {step: sum(part.get(step, 0.0) for part in parts) for step in sorted({step for p in parts for step in p})}
