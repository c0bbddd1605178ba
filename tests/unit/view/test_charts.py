"""What is drawn: points, bins and bounds."""

import pytest

from salesrl_trl.record.view.charts import MAX_POINTS, Line, bar_chart, line_chart


@pytest.mark.parametrize(
    ("values", "from_zero", "is_log"),
    [
        ([0.1, 0.1, 1e30, 0.1], False, True),  # one figure far off
        ([0.1, 0.2, 0.3, 0.1], True, False),
        ([0.0, 0.1, 1e30, 0.1], True, False),  # 0 has no logarithm
        ([-0.1, 0.1, 0.2, 0.1], False, False),
    ],
)
def test_an_axis_begins_at_0_or_is_logarithmic_where_one_figure_would_hide_the_rest(values, from_zero, is_log):
    chart = line_chart("KL", [Line("KL", 0, dict(enumerate(values)))], from_zero=True)
    assert (chart["from_zero"] and not chart["is_log"], chart["is_log"]) == (from_zero, is_log)
    assert not line_chart("KL", [Line("KL", 0, dict(enumerate(values)))])["is_log"]


def test_a_long_run_is_smoothed_and_its_picture_stays_small():
    series = {step: float(step % 2) for step in range(1, 20_001)}
    chart = line_chart("reward", [Line("a", 0, series), Line("b", 1, series, is_dashed=True), Line("c", 2, {})])
    assert chart["label"] == "reward (strong: mean of 1000)"
    line, dashed = chart["lines"]  # one without figures is no line
    assert len(line["pale"]) == len(line["points"]) <= MAX_POINTS
    assert line["points"][-1] == (20_000, 0.5)
    assert dashed["pale"] == []
    short = line_chart("reward", [Line("a", 0, {7: 0.123456789})])["lines"][0]
    assert (short["pale"], short["points"]) == ([], [(7, 0.12346)])


def test_layers_are_sums_of_counts_or_means_over_bounded_bins():
    chart = bar_chart("s", [1, 2], {"a": {1: 1.0, 2: 2.0}, "b": {1: 1.0}})
    assert [layer["heights"] for layer in chart["layers"]] == [[1.0, 2.0], [1.0, 0.0]]
    assert chart["edges"] == [0.5, 1.5, 2.5]
    steps = range(1, 1001)  # 5 in a bin, each with 2 failures of a and a mean of 2
    counted = bar_chart("n", steps, {"a": dict.fromkeys(steps, 2.0)}, are_counts=True)
    mean = bar_chart("n", steps, {"a": dict.fromkeys(steps, 2.0)})
    assert [chart["layers"][0]["heights"] for chart in (counted, mean)] == [[10.0] * 200, [2.0] * 200]


def test_the_smallest_of_many_layers_and_the_grey_one_become_one():
    layers = {f"l{n}": {1: float(n)} for n in range(1, 13)}
    names = [layer["name"] for layer in bar_chart("s", [1], layers, grey="l12")["layers"]]
    assert names == [*(f"l{n}" for n in range(4, 12)), "all other"]
    few = bar_chart("s", [1], {"grey": {1: 1.0}, "a": {1: 2.0}}, grey="grey")["layers"]
    assert [(layer["name"], layer["colour"]) for layer in few] == [("a", 0), ("grey", "rest")]


@pytest.mark.parametrize(
    ("totals", "top", "tall"),
    [
        ([15.9] + [1.5] * 30, 1.3 * 1.5, [0]),  # a first step with an evaluation
        ([4.0] + [1.5] * 30, 4.0, []),  # not three times as high
        ([15.9] + [1.5] * 5, 15.9, []),  # too few to say what is usual
        ([15.9] * 5 + [1.5] * 30, 15.9, []),  # too many to be exceptions
        ([15.9] + [0.0] * 30, 15.9, []),  # nothing else to be seen
    ],
)
def test_a_bar_that_towers_over_nearly_all_others_is_cut_off_and_its_height_told(totals, top, tall):
    chart = bar_chart("s", range(len(totals)), {"a": dict(enumerate(totals))})
    assert chart["top"] == pytest.approx(top)
    assert chart["notes"] == [(at, "15.9 ↑") for at in tall]
