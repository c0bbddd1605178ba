"""What is read of a run's folder, whole, cut off or resumed."""

import json
import math
import subprocess

import pytest
from support.forked import COLD_PYTHON

from salesrl_trl.errors import ConfigError
from salesrl_trl.record.view.run_folder import read_run


def test_a_whole_run_is_read(two_branches):
    run = read_run(two_branches.path)

    assert run.steps == tuple(range(1, 21))
    assert run.branches == ("fairness", "hallucination")
    assert run.of("reward")[20] == pytest.approx(0.2)
    assert run.of("never/logged") == {}
    # Step 20 is written 20 x 10 s after the start.
    assert run.seconds == (1_700_000_000.0, 1_700_000_200.0)
    assert (len(run.starts), run.infinite, run.unread) == (1, 0, ())
    assert [each.step for each in run.quick_evals] == [5, 10, 15, 20]
    assert run.quick_evals[1].best
    assert run.quick_evals[3].scores == {"fairness": 0.4, "hallucination": None}
    assert run.quick_evals[0].figures == {"questions": 0.25}
    assert run.held_out[20] == {"reward": 0.45, "fairness": 0.56, "valid_actions": None}


def test_of_a_step_that_a_resume_repeats_the_later_figure_counts_whatever_the_order_of_the_files(run_folder):
    # The later start is the file that is read first: its name sorts before the other's.
    run_folder.events({3: {"reward": 0.9}, 4: {"reward": 0.8}}, started_s=1_700_009_000.0)
    run_folder.events({1: {"reward": 0.1}, 2: {"reward": 0.2}, 3: {"reward": 0.3}})

    run = read_run(run_folder.path)

    assert run.of("reward") == pytest.approx({1: 0.1, 2: 0.2, 3: 0.9, 4: 0.8})
    assert list(run.of("reward")) == [1, 2, 3, 4]
    assert run.starts == (1, 3)
    # 9000 s later plus four steps of 10 s.
    assert run.seconds == (1_700_000_000.0, 1_700_009_040.0)


def test_a_clock_that_is_set_back_in_a_run_costs_no_figure(run_folder):
    run_folder.events({1: {"reward": 0.1}, 2: {"reward": 0.2}, 3: {"reward": 0.3}}, seconds_per_step=-3600.0)
    assert read_run(run_folder.path).of("reward") == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3})


@pytest.mark.parametrize("cut", [1, 4, 20, 40])
def test_a_record_that_was_cut_off_ends_the_file_and_what_is_before_it_counts(run_folder, cut):
    file = run_folder.events({1: {"reward": 0.1}, 2: {"reward": 0.2}, 3: {"reward": 0.3}})
    content = file.read_bytes()
    # A record is 16 bytes of frame and some 40 of event, so that each cut is inside the third step's.
    file.write_bytes(content[:-cut])
    assert read_run(run_folder.path).of("reward") == pytest.approx({1: 0.1, 2: 0.2})


@pytest.mark.parametrize(
    ("files", "steps", "starts"),
    [
        ([{}], (), 0),
        ([{1: {"reward": 0.1}}, {}], (1,), 1),  # settings alone
        ([{1: {"reward": 0.1}, 2: {"reward": 0.2}}, {2: {"epoch": 1.0}}], (1, 2), 1),  # of a last evaluation
        ([{0: {"quick_eval/a/score": 0.1}, 1: {"reward": 0.1}, 2: {"quick_eval/a/score": 0.1}}], (1,), 1),
    ],
    ids=["empty", "settings", "last evaluation", "quick evaluations"],
)
def test_what_trains_no_step_is_no_step_and_no_start(run_folder, files, steps, starts):
    for number, figures in enumerate(files):
        run_folder.events(figures, started_s=1_700_000_000.0 + 9000 * number)
    run = read_run(run_folder.path)
    assert (run.steps, len(run.starts)) == (steps, starts)


def test_a_later_nan_takes_the_place_of_an_earlier_figure(run_folder):
    run_folder.events({1: {"reward": 0.25}, 2: {"reward": 0.2}})
    run_folder.events({2: {"reward": math.nan}}, started_s=1_700_009_000.0)
    assert read_run(run_folder.path).of("reward") == {1: 0.25}


def test_infinite_figures_are_counted_and_nan_is_not(run_folder):
    run_folder.events({1: {"kl/a": math.inf, "memory/gpu_peak_gib": math.nan, "reward/a": 0.1}, 2: {"kl/a": 0.1}})
    run = read_run(run_folder.path)
    assert run.of("kl/a") == pytest.approx({2: 0.1})
    assert run.of("memory/gpu_peak_gib") == {}
    assert run.infinite == 1


def test_both_kinds_of_scalar_that_tensorboard_writers_make_are_read(run_folder):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(run_folder.path / "runs" / "host")) as writer:
        writer.add_scalar("train/reward", 0.25, 1)
        writer.add_scalar("train/reward", 0.5, 2, new_style=True)
        writer.add_scalar("eval/reward", 0.75, 3)
        writer.add_text("train/words", "no scalar", 4)
    assert read_run(run_folder.path).series == {"reward": {1: 0.25, 2: 0.5}}


def test_a_quick_evaluation_that_was_cut_off_is_told_and_the_later_of_one_step_counts(run_folder):
    run_folder.events({1: {"reward": 0.1}})
    run_folder.quick_evals(
        {"step": 20, "mode": "greedy", "reward": 0.1, "branches": {"a": {"score": 0.1}}},
        {"step": 10, "mode": "greedy", "reward": None, "branches": {"a": {"score": None}}},
        {"step": 20, "mode": "greedy", "reward": 0.4, "branches": {"a": {"score": 0.4}}},
        {"mode": "greedy"},
        cut_off='{"step": 30, "mode": "gre',
    )

    run = read_run(run_folder.path)

    assert [(each.step, each.reward, each.scores) for each in run.quick_evals] == [
        (10, None, {"a": None}),
        (20, 0.4, {"a": 0.4}),
    ]
    # The one without a step, and the one that was cut off.
    assert run.unread == ("2 lines of quick_eval.jsonl could not be read, left out",)


@pytest.mark.parametrize(
    ("odd", "read"),
    [
        ({"step": 5}, (5, "evaluation", None, {})),
        ({"step": 5, "mode": None, "branches": None, "figures": None}, (5, "evaluation", None, {})),
        ({"step": 5.0, "mode": "own", "reward": "0.3", "branches": {"a": 3}}, (5, "own", None, {"a": None})),
        ({"step": 5, "mode": "own", "reward": True, "branches": {"a": {"score": []}}}, (5, "own", None, {"a": None})),
        *(({"step": step, "mode": "own"}, None) for step in (None, "5", math.nan, math.inf)),
        *((foreign, None) for foreign in ([1], 12, None, "text", {})),
    ],
)
def test_an_evaluation_of_another_form_costs_no_other_one(run_folder, odd, read):
    run_folder.events({1: {"reward": 0.1}})
    run_folder.quick_evals({"step": 10, "mode": "greedy", "reward": 0.25, "branches": {"a": {"score": 0.25}}}, odd)
    run = read_run(run_folder.path)
    read_all = [(each.step, each.mode, each.reward, each.scores) for each in run.quick_evals]
    assert read_all == [*filter(None, [read]), (10, "greedy", 0.25, {"a": 0.25})]
    assert run.unread == (() if read else ("1 line of quick_eval.jsonl could not be read, left out",))


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("text", "read", "unread"),
    [
        *((text, {}, "") for text in ("", "[{", '{"step": 1}', "3", "[3]", '[{"step": Infinity}]', DEEP)),
        ('[{"step": 5, "reward": 0.5, "fairness": "x"}, null]', {5: {"reward": 0.5, "fairness": None}}, " in part"),
    ],
)
def test_held_out_figures_that_cannot_be_read_are_told(run_folder, text, read, unread):
    run_folder.events({1: {"reward": 0.1}})
    (run_folder.path / "held_out.json").write_text(text)
    run = read_run(run_folder.path)
    assert (run.held_out, run.unread) == (read, (f"held_out.json could not be read{unread}",))


@pytest.mark.parametrize("name", ["quick_eval.jsonl", "budget.json"])
def test_a_file_that_is_nested_too_deeply_is_told(run_folder, name):
    run_folder.events({1: {"reward": 0.1}})
    (run_folder.path / name).write_text(DEEP)
    assert "could not be read" in read_run(run_folder.path).unread[0]


@pytest.mark.parametrize("value", [None, math.inf, math.nan])
def test_what_is_no_finite_number_is_no_figure(run_folder, value):
    run_folder.events({1: {"reward": 0.1}})
    run_folder.held_out({"step": 0, "reward": value})
    assert read_run(run_folder.path).held_out == {0: {"reward": None}}


def test_event_files_may_lie_elsewhere(run_folder, tmp_path):
    file = run_folder.events({1: {"reward": 0.1}})
    elsewhere = tmp_path / "boards" / "runs"
    elsewhere.mkdir(parents=True)
    file.rename(elsewhere / file.name)
    with pytest.raises(ConfigError, match="--logging_dir"):
        read_run(run_folder.path)
    assert read_run(run_folder.path, tmp_path / "boards").of("reward") == pytest.approx({1: 0.1})
    with pytest.raises(ConfigError, match="no folder"):
        read_run(run_folder.path, tmp_path / "nowhere")


def test_the_report_starts_without_what_is_heavy():
    heavy = ("torch", "trl", "vllm", "transformers", "matplotlib", "tensorboard", "numpy")
    code = (
        f"import sys, json, salesrl_trl.record.report; print(json.dumps([m for m in {heavy!r} if m in sys.modules]))"
    )
    told = subprocess.run([COLD_PYTHON, "-c", code], check=True, capture_output=True, text=True).stdout
    assert json.loads(told) == []


def test_what_a_later_start_goes_back_behind_is_forgotten(run_folder):
    """Another run in the same folder, and a resume from an earlier checkpoint, which has not come so far yet."""
    run_folder.events({step: {"reward": 0.9, "failures/reason/old": 2.0} for step in range(1, 11)})
    run_folder.events({step: {"reward": 0.1} for step in (1, 2, 3)}, started_s=1_700_009_000.0)
    run_folder.events({3: {"reward": 0.2}}, started_s=1_700_020_000.0)
    run = read_run(run_folder.path)
    assert run.of("reward") == pytest.approx({1: 0.1, 2: 0.1, 3: 0.2})
    assert run.of("failures/reason/old") == {}
    assert len(run.starts) == 3
