"""What is read of a run's folder, whole, cut off or resumed; the page's figures; the command line."""

import json
import math
import re
import subprocess

import pytest
from support.forked import COLD_PYTHON

from salesrl_trl.errors import ConfigError
from salesrl_trl.judged.budget import USD, Limit, Spent, open_account
from salesrl_trl.names import SPENT_FILE
from salesrl_trl.record import report as command
from salesrl_trl.record.report import MAX_LINES, MAX_POINTS, figures_of, read_run


def figures(run_folder, *more):
    assert command.main([str(run_folder.path), *more]) == 0
    html = (run_folder.path / "report.html").read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', html)[1])["report"]["figures"]


def test_a_page_has_the_figures_of_a_run(two_branches):
    limit = Limit(name="judge_providers[a].max_usd", kind=USD, most=2.0, service="judge_a")
    with open_account(two_branches.path / SPENT_FILE) as account:
        account.services = {"judge_a": Spent(calls=30, prompt_tokens=9000, completion_tokens=600, usd=0.42)}
        account.give_back(limit, 0.0)
    found = figures(two_branches)

    assert [(line["name"], line["dash"]) for line in found["reward"]] == [
        ("", 0), ("fairness", 0), ("fairness", 1), ("hallucination", 0)
    ]  # fmt: skip
    assert found["reward"][1]["points"][:2] == [[1, 0.02], [2, 0.04]]
    assert [(each["branch"], each["band"]) for each in found["kl"]] == [
        ("fairness", pytest.approx([0.02, 0.06, 0.75])), ("hallucination", pytest.approx([0.02, 0.06, 0.2]))
    ]  # fmt: skip
    assert found["kl"][1]["beta"][0]["points"][-1] == [20, 0.1]
    assert found["phases"]["rows"][0] == ["reward_wait", pytest.approx(6.2), pytest.approx(0.62)]
    assert found["failures"]["rows"] == [["missing_field", 40, 0.8], ["rag_8b_timeout", 10, 0.2]]
    assert found["held_out"] == {
        "kinds": ["fairness", "reward", "valid_actions"], "rows": [[0, 0.36, 0.29, 0.9], [20, 0.56, 0.45, None]]
    }  # fmt: skip
    assert found["spent"] == [
        {"service": "judge_a", "calls": 30, "prompt_tokens": 9000, "completion_tokens": 600, "usd": 0.42}
    ]
    assert found["limits"] == [["judge_providers[a].max_usd", 0.42, 2.0]]


def test_the_page_is_one_file_that_asks_for_nothing_and_text_of_files_is_escaped(run_folder):
    evil = '</script><script>alert("1")</script>'
    run_folder.events({1: {f"reward/{evil}": 0.1, f"kl/{evil}": 0.1, f"failures/reason/{evil}": 1.0}})
    assert figures(run_folder)["failures"]["rows"] == [[evil, 1.0, 1.0]]
    html = (run_folder.path / "report.html").read_text(encoding="utf-8")
    assert "connect-src 'none'" in html and "<script>alert" not in html and "\\u003cscript>alert" in html
    assert not re.search(r"<(link|script|img|iframe)[^>]* (href|src)=\"(?!data:)", html)


def test_a_run_that_logged_nothing_has_a_page_too(run_folder):
    run_folder.events({})
    found = figures(run_folder)
    empty = {"lines": [], "rows": []}
    assert (found["reward"], found["kl"], found["phases"], found["failures"]) == ([], [], empty, empty)


def test_phases_are_shares_of_all_steps_also_where_one_was_not_in_every_step(run_folder):
    run_folder.events({
        1: {"time/step_s": 2.0, "time/forward_s": 1.0},
        2: {"time/step_s": 6.0, "time/forward_s": 3.0, "time/checkpoint_s": 2.0},
    })  # fmt: skip
    # forward 4 s and checkpoint 2 s of 8 s; per step 2 s and 1 s.
    assert figures(run_folder)["phases"]["rows"] == [["forward", 2.0, 0.5], ["checkpoint", 1.0, 0.25]]


def test_however_much_there_is_a_page_stays_small(run_folder):
    many = {f"failures/reason/r{number}": float(number) for number in range(100)}
    run_folder.events({1: many, **{step: {"reward": float(step % 2)} for step in range(2, 3000)}})
    found = figures_of(read_run(run_folder.path))
    assert (len(found["failures"]["lines"]), len(found["failures"]["rows"])) == (MAX_LINES, 30)
    assert found["failures"]["rows"][0][0] == "r99"
    points = found["reward"][0]["points"]
    assert len(points) <= MAX_POINTS and points[-1][0] == 2999


def test_of_a_step_that_a_resume_repeats_the_later_figure_counts_whatever_the_order_of_the_files(run_folder):
    # The later start is the file that is read first: its name sorts before the other's.
    run_folder.events({3: {"reward": 0.9}, 4: {"reward": 0.8}}, started_s=1_700_009_000.0)
    run_folder.events({1: {"reward": 0.1}, 2: {"reward": 0.2}, 3: {"reward": 0.3}})
    run_folder.events({4: {"epoch": 1.0}}, started_s=1_700_020_000.0)  # of a last evaluation
    assert read_run(run_folder.path).of("reward") == pytest.approx({1: 0.1, 2: 0.2, 3: 0.9, 4: 0.8})


def test_what_a_later_start_goes_back_behind_is_forgotten(run_folder):
    """Another run in the same folder, and a resume from an earlier checkpoint, which has not come so far yet."""
    run_folder.events({step: {"reward": 0.9, "failures/reason/old": 2.0} for step in range(1, 11)})
    run_folder.events({step: {"reward": 0.1} for step in (1, 2, 3)}, started_s=1_700_009_000.0)
    run_folder.events({3: {"reward": 0.2}}, started_s=1_700_020_000.0)
    run = read_run(run_folder.path)
    assert run.of("reward") == pytest.approx({1: 0.1, 2: 0.1, 3: 0.2})
    assert run.of("failures/reason/old") == {}


def test_a_clock_that_is_set_back_in_a_run_costs_no_figure(run_folder):
    run_folder.events({1: {"reward": 0.1}, 2: {"reward": 0.2}, 3: {"reward": 0.3}}, seconds_per_step=-3600.0)
    assert read_run(run_folder.path).of("reward") == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3})


@pytest.mark.parametrize("cut", [1, 20])
def test_a_record_that_was_cut_off_ends_the_file_and_what_is_before_it_counts(run_folder, cut):
    file = run_folder.events({1: {"reward": 0.1}, 2: {"reward": 0.2}, 3: {"reward": 0.3}})
    # A record is 16 bytes of frame and some 40 of event, so that each cut is inside the third step's.
    file.write_bytes(file.read_bytes()[:-cut])
    assert read_run(run_folder.path).of("reward") == pytest.approx({1: 0.1, 2: 0.2})


def test_what_is_no_finite_number_is_no_figure_and_takes_the_place_of_an_earlier_one(run_folder):
    run_folder.events({1: {"reward": 0.25, "kl/a": math.inf}, 2: {"reward": 0.2}})
    run_folder.events({2: {"reward": math.nan}}, started_s=1_700_009_000.0)
    run = read_run(run_folder.path)
    assert (run.of("reward"), run.of("kl/a")) == ({1: 0.25}, {})


@pytest.mark.parametrize("name", ["held_out.json", "budget.json"])
@pytest.mark.parametrize("text", ["[{", "[3]", "[" * 100_000])
def test_a_file_that_can_not_be_read_is_named(run_folder, name, text):
    run_folder.events({1: {"reward": 0.1}})
    (run_folder.path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"{name},? can't be read"):
        read_run(run_folder.path)


@pytest.mark.parametrize(("case", "words"), [("nowhere", "is not a folder"), ("", "contain TensorBoard files")])
def test_bad_input_is_exit_code_2_with_one_message_and_no_file(run_folder, capsys, case, words):
    assert command.main([str(run_folder.path / case)]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert words in told.err and "Expected" in told.err
    assert not (run_folder.path / "report.html").exists()


def test_the_page_is_in_the_language_that_is_asked_for(run_folder, capsys):
    run_folder.events({1: {"reward": 0.25}})
    assert command.main([str(run_folder.path), "--lang", "zh"]) == 0
    html = run_folder.path / "report.html"
    assert capsys.readouterr().out == f"Page: {html}\n"
    assert '"language": "zh"' in html.read_text(encoding="utf-8")


def test_the_report_starts_without_what_is_heavy():
    heavy = {"torch", "trl", "vllm", "transformers", "matplotlib", "tensorboard", "numpy"}
    code = f"import sys, salesrl_trl.record.report; sys.exit(str({heavy!r} & sys.modules.keys() or 0))"
    done = subprocess.run([COLD_PYTHON, "-c", code], check=False, capture_output=True, text=True)
    assert done.stderr == "0\n"
