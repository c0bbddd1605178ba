"""What is drawn: places, scales and bounds."""

import re

import pytest

from salesrl_trl.record.view import charts
from salesrl_trl.record.view.charts import (
    BOTTOM,
    HEIGHT,
    TOP,
    Line,
    line_chart,
    stacked_chart,
)

FLOOR = HEIGHT - BOTTOM


def places(path):
    """The points of a path that is a line."""
    return [tuple(map(float, point.split())) for point in path.d[1:].split("L")]


def heights(path):
    """Of the bars of a layer: their lower and upper edges."""
    return [tuple(map(float, edges)) for edges in re.findall(r"M\S+ (\S+)V(\S+)H", path.d)]


def test_a_line_goes_from_end_to_end_of_its_axes():
    chart = line_chart("", "y", [Line("a", "red", {1: 0.0, 2: 1.0, 3: 0.5})], from_zero=True, starts=[2, 9])
    (x1, y1), (x2, y2), (x3, y3) = places(chart.paths[0])
    assert x2 - x1 == pytest.approx(x3 - x2)
    assert chart.notes == [(x2, "↻")]  # where a run goes on; not beyond the line
    assert y1 == FLOOR  # 0
    # 8 % of the height are left above the largest figure
    assert y2 == pytest.approx(FLOOR - (FLOOR - TOP) / 1.08, abs=0.1)
    assert y3 == pytest.approx((y1 + y2) / 2, abs=0.1)
    assert [words for _, words in chart.x_ticks] == ["1", "2", "3"]
    assert [words for _, words in chart.y_ticks] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]


def test_one_figure_far_off_makes_the_axis_logarithmic():
    series = {step: 1e30 if step == 3 else 0.1 for step in range(1, 6)}
    chart = line_chart("", "KL", [Line("KL", "red", series)], from_zero=True, band=(0.02, 0.06))
    assert {"100", "1e+10"} & {words for _, words in chart.y_ticks}
    assert len({y for _, y in places(chart.paths[1])}) == 2
    assert len(chart.y_ticks) < 10


def test_a_long_run_is_smoothed_and_its_picture_stays_small():
    series = {step: float(step % 2) for step in range(1, 20_001)}
    chart = line_chart("", "reward", [Line("a", "red", series), Line("b", "blue", series, is_dashed=True)])
    assert chart.y_label == "reward (strong: mean of 1000)"
    pale, strong, dashed = chart.paths
    assert all(len(path.d) < 12_000 for path in chart.paths)
    assert {round(y) for _, y in places(strong)[10:]} == {round((TOP + FLOOR) / 2)}
    assert (pale.opacity < 1, strong.opacity, dashed.dash) == (True, 1, "5 4")


@pytest.mark.parametrize("value", [0.0, 0.3, -2.0])
def test_one_step_has_a_mark(value):
    for from_zero in (True, False):
        chart = line_chart("", "y", [Line("a", "red", {7: value})], from_zero=from_zero)
        assert chart.paths[-1].d.endswith("h0")
        assert "7" in [words for _, words in chart.x_ticks]
        assert chart.y_ticks


def test_layers_of_a_stack_lie_on_each_other_and_bins_are_bounded():
    chart = stacked_chart("", "s", [1, 2], {"a": {1: 1.0, 2: 2.0}, "b": {1: 1.0}})
    (floor, one), (_, two) = heights(chart.paths[0])
    [(start, top)] = heights(chart.paths[1])
    assert (floor, start) == (FLOOR, one)
    assert top == two == pytest.approx(FLOOR - (FLOOR - TOP) / 1.05, abs=0.1)

    steps = range(1, 1001)  # 5 in a bin, each with 2 failures of a and a mean of 2
    counted = stacked_chart("", "n", steps, {"a": dict.fromkeys(steps, 2.0)}, summed=True)
    mean = stacked_chart("", "n", steps, {"a": dict.fromkeys(steps, 2.0)})
    assert len(heights(counted.paths[0])) == len(heights(mean.paths[0])) == 200
    assert [chart.y_ticks[-1][1] for chart in (counted, mean)] == ["10", "2"]


def test_the_smallest_of_many_layers_and_the_grey_one_become_one():
    layers = {f"l{n}": {1: float(n)} for n in range(1, 13)}
    names = [key.name for key in stacked_chart("", "s", [1], layers, grey="l12").keys]
    assert names == [*(f"l{n}" for n in range(4, 12)), "all other"]
    few = stacked_chart("", "s", [1], {"grey": {1: 1.0}, "a": {1: 2.0}}, grey="grey").keys
    assert [(key.name, key.colour == charts.REST_COLOUR) for key in few] == [("a", False), ("grey", True)]


@pytest.mark.parametrize(
    ("totals", "top", "tall"),
    [
        ([15.9] + [1.5] * 30, 1.3 * 1.5, [0]),  # a first step with an evaluation
        ([4.0] + [1.5] * 30, 1.05 * 4.0, []),  # not three times as high
        ([15.9] + [1.5] * 5, 1.05 * 15.9, []),  # too few to say what is usual
        ([15.9] * 5 + [1.5] * 30, 1.05 * 15.9, []),  # too many to be exceptions
        ([15.9] + [0.0] * 30, 1.05 * 15.9, []),  # nothing else to be seen
    ],
)
def test_a_bar_that_towers_over_nearly_all_others_is_cut_off_and_its_height_told(totals, top, tall):
    chart = stacked_chart("", "s", range(len(totals)), {"a": dict(enumerate(totals))})
    highest = max(float(words) for _, words in chart.y_ticks)
    assert highest <= top < 2.1 * highest
    assert [words for _, words in chart.notes] == ["15.9 ↑"] * len(tall)
    assert min(upper for _, upper in heights(chart.paths[0])) >= TOP
