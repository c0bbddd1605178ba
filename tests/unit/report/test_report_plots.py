"""What is drawn, and that hostile names and odd runs are drawn too."""

import struct
import sys
import zlib

import pytest

pytest.importorskip("matplotlib")

from salesrl_trl.errors import ConfigError
from salesrl_trl.report import paper
from salesrl_trl.report.plots import draw
from salesrl_trl.report.records import read_run


def image_size(picture):
    """Width and height of a PNG whose every chunk has its checksum."""
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    at, kinds = 8, []
    while at < len(picture):
        (length,) = struct.unpack(">I", picture[at : at + 4])
        chunk = picture[at + 4 : at + 8 + length]
        assert struct.unpack(">I", picture[at + 8 + length : at + 12 + length]) == (zlib.crc32(chunk),)
        kinds.append(chunk[:4])
        at += 12 + length
    assert (kinds[0], kinds[-1]) == (b"IHDR", b"IEND")
    return struct.unpack(">II", picture[16:24])


def test_a_run_with_everything_gives_every_picture(two_branches):
    pictures = draw(read_run(two_branches.path))

    assert set(pictures.kl) == {"fairness", "hallucination"}
    # 8.6 x 3.1 inches at 160 dots per inch; the plane of the evaluations is 4.2 inches high.
    wide = [pictures.reward, *pictures.kl.values(), pictures.step_time, pictures.reward_time, pictures.failures]
    assert {image_size(picture) for picture in wide} == {(1376, 496)}
    assert image_size(pictures.quick_evals) == (1376, 672)


def test_pictures_of_one_run_are_equal(two_branches):
    run = read_run(two_branches.path)
    assert draw(run) == draw(run)


def test_a_run_without_figures_gives_no_picture(run_folder):
    run_folder.events({})
    pictures = draw(read_run(run_folder.path))
    assert (pictures.reward, pictures.step_time, pictures.reward_time) == (None, None, None)
    assert (pictures.failures, pictures.quick_evals, pictures.kl) == (None, None, {})


def test_one_step_is_drawn(run_folder):
    run_folder.events(
        {
            1: {"reward/a": 0.1, "kl/a": 0.0, "beta/a": 0.0, "time/forward_s": 1.0, "time/step_s": 1.0,
                "time/reward_exposed_s": 0.0, "time/reward_hidden_s": 0.0, "failures/reason/x": 1.0}
        }
    )  # fmt: skip
    pictures = draw(read_run(run_folder.path))
    drawn = (pictures.reward, pictures.kl["a"], pictures.step_time, pictures.reward_time, pictures.failures)
    assert [image_size(picture) for picture in drawn] == [(1376, 496)] * 5


@pytest.mark.parametrize(
    "name",
    [r"$\frac{$", "_hidden", "公平", "<script>alert(1)</script>", "a\x1b[31m", "x" * 500, "$"],
    ids=["formula", "underscore", "chinese", "html", "escape", "long", "dollar"],
)
def test_a_hostile_name_is_drawn_without_a_warning(run_folder, name):
    run_folder.events(
        {
            step: {f"reward/{name}": 0.1, f"kl/{name}": 0.1, f"failures/reason/{name}": 1.0, "time/step_s": 1.0}
            for step in (1, 2)
        }
    )
    branches = {name: {"score": 0.1}, "b": {"score": 0.2}}
    run_folder.quick_evals({"step": 1, "mode": name, "reward": 0.1, "branches": branches})
    pictures = draw(read_run(run_folder.path))
    assert image_size(pictures.failures) == (1376, 496)
    assert image_size(pictures.kl[name]) == (1376, 496)
    assert image_size(pictures.quick_evals) == (1376, 672)


def test_one_figure_far_off_does_not_stop_the_drawing(run_folder):
    run_folder.events({step: {"kl/a": 1e30 if step == 3 else 0.1, "beta/a": 0.1} for step in range(1, 6)})
    assert image_size(draw(read_run(run_folder.path)).kl["a"]) == (1376, 496)


def test_three_branches_have_no_plane(run_folder):
    run_folder.events({1: {f"reward/{branch}": 0.1 for branch in "abc"}})
    branches = {branch: {"score": 0.1} for branch in "abc"}
    run_folder.quick_evals({"step": 1, "mode": "greedy", "reward": 0.1, "branches": branches})
    assert draw(read_run(run_folder.path)).quick_evals is None


def test_a_missing_matplotlib_is_told_with_how_to_install_it(run_folder, monkeypatch):
    run_folder.events({1: {"reward": 0.1}})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'salesrl_trl\[plots\]'"):
        draw(read_run(run_folder.path))


@pytest.mark.parametrize(
    ("heights", "top"),
    [
        ([15.9] + [1.5] * 30, 1.3 * 1.5),  # a first step with an evaluation
        ([4.0] + [1.5] * 30, None),  # not three times as high
        ([15.9] + [1.5] * 5, None),  # too few to say what is usual
        ([15.9] * 5 + [1.5] * 30, None),  # too many to be exceptions
        ([15.9] + [0.0] * 30, None),  # nothing else to be seen
    ],
)
def test_a_bar_that_towers_over_nearly_all_others_is_cut_off_and_its_height_told(heights, top):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    axes.bar(range(len(heights)), heights)
    before = axes.get_ylim()[1]
    paper._cut_off(axes, list(range(len(heights))), heights)
    assert axes.get_ylim()[1] == pytest.approx(before if top is None else top)
    assert [each.get_text().strip() for each in axes.texts] == ([] if top is None else ["15.9 ↑"])
