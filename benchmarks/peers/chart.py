"""README's chart: seconds per step by reward latency, from the rows of `latency.csv`.

    python -m benchmarks.peers.chart > docs/latency.svg

The rows are those of benchmarks/log/2026-11-26-peers.md, with its runs' numbers. Points of fewer than seven counted
steps are hollow, and their lines dashed. A pure function of the file: no library draws, so that the picture follows
the reader's light or dark theme.
"""

import csv
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

ROWS = Path(__file__).with_name("latency.csv")
WIDTH, HEIGHT = 430, 440  # narrow, so that labels stay legible on a phone
LEFT, RIGHT, TOP, BOTTOM = 94, 192, 40, 380
MOST_S = 34
ROOM = {LEFT: 17, RIGHT: 35}  # between two labels: the right ones have two lines
LATENCY = "5.6 + 3.2 s"  # medians of the two waits that a slow reward has: `latency.csv` has their sum
OURS = "salesrl_trl"
ENOUGH = 7  # steps of a full point
STYLE = """
  text { font: 15px system-ui, sans-serif; fill: #24292f }
  .axis { stroke: #8c959f; stroke-width: 1 }
  .grid { stroke: #8c959f; stroke-opacity: .25 }
  .other { stroke: #6e7781; fill: #6e7781 }
  .ours { stroke: #1a7f37; fill: #1a7f37 }
  line.other, line.ours { stroke-width: 2.5 }
  line.few { stroke-dasharray: 6 5 }
  circle.few { fill: #fff; stroke-width: 2 }
  .small { font-size: 14px; fill: #57606a }
  text.ours { stroke: none; font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 }
    .other { stroke: #9198a1; fill: #9198a1 } .ours { stroke: #3fb950; fill: #3fb950 }
    circle.few { fill: #0d1117 }
  }
"""


class Point(NamedTuple):
    latency_s: float
    step_s: float
    steps: int


def read(path: Path = ROWS) -> dict[str, list[Point]]:
    """The points of each system, by latency."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[1:]
    return {
        system: [Point(float(latency), float(step), int(steps)) for _, latency, step, steps, _ in of_system]
        for system, of_system in groupby(rows, key=lambda row: row[0])
    }


def drawn(systems: dict[str, list[Point]]) -> str:
    """The chart as SVG."""
    parts = [_axes()]
    dots: list[str] = []  # over the lines
    for system, points in systems.items():
        kind, few = _kind(system), any(point.steps < ENOUGH for point in points)
        if len(points) > 1:
            (x1, y1), (x2, y2) = [(_x(point), _y(point.step_s)) for point in points]
            line = f'x1="{x1}" y1="{y1:.1f}" x2="{x2}" y2="{y2:.1f}"'
            parts.append(f'<line class="{kind}{" few" if few else ""}" {line}/>')
        for point in points:
            own = f"{kind} few" if point.steps < ENOUGH else kind
            dots.append(f'<circle class="{own}" cx="{_x(point)}" cy="{_y(point.step_s):.1f}" r="4"/>')
    parts += dots
    for end, shift, anchor in ((LEFT, -10, 'text-anchor="end"'), (RIGHT, 10, "")):
        shown = [(system, point) for system, points in systems.items() for point in points if _x(point) == end]
        labels = _apart([_y(point.step_s) for _, point in shown], ROOM[end])
        for (system, point), y in zip(shown, labels, strict=True):
            ours = 'class="ours" ' if _kind(system) == "ours" else ""
            parts.append(_text(end + shift, y + 5, _value(point), f"{ours}{anchor}"))
            if end == RIGHT:
                parts.append(_text(end + shift, y + 21, system, ours))
    body = "\n".join(parts)
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    label = 'role="img" aria-label="Seconds per step by reward latency"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {label}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def _kind(system: str) -> str:
    return "ours" if system.startswith(OURS) else "other"


def _x(point: Point) -> int:
    return RIGHT if point.latency_s else LEFT


def _y(seconds: float) -> float:
    return BOTTOM - seconds / MOST_S * (BOTTOM - TOP)


def _apart(heights: Sequence[float], room: float) -> list[float]:
    """The heights of labels, from below, with room between two."""
    placed, lowest = [0.0] * len(heights), float("inf")
    for number in sorted(range(len(heights)), key=heights.__getitem__, reverse=True):
        placed[number] = lowest = min(heights[number], lowest - room)
    return placed


def _axes() -> str:
    lines = [_text(0, 20, "seconds per step (steps averaged)", 'class="small"')]
    for seconds in range(0, MOST_S, 10):
        y = _y(seconds)
        lines.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}"/>')
    for x, label in ((LEFT, "instant"), (RIGHT, LATENCY)):
        lines.append(f'<line class="axis" x1="{x}" y1="{TOP}" x2="{x}" y2="{BOTTOM}"/>')
        lines.append(_text(x, BOTTOM + 20, label, 'text-anchor="middle"'))
    lines.append(
        _text((LEFT + RIGHT) / 2, BOTTOM + 40, "reward latency (medians)", 'class="small" text-anchor="middle"')
    )
    return "\n".join(lines)


def _value(point: Point) -> str:
    return f"{point.step_s:.3g} s ({point.steps})"


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.1f}" {attributes}>{text}</text>'


def main(argv: Sequence[str] | None = None) -> None:
    """Print the chart."""
    print(drawn(read()), end="")


if __name__ == "__main__":
    main()
