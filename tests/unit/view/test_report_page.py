"""The page and the text, as a reader and as a browser get them; the command line."""

import json
import re

import pytest

from salesrl_trl.judged.budget import USD, Limit, Spent, open_account
from salesrl_trl.names import JUDGE_ALARMS, SPENT_FILE, Phase, Stage
from salesrl_trl.record import report as command
from salesrl_trl.record.view.report_page import sections, text_page
from salesrl_trl.record.view.run_folder import read_run
from salesrl_trl.record.view.wording import in_language


class Page:
    """What a page draws: rows of its tables, its texts, and the names of its charts."""

    def __init__(self, sections):
        parts = [part for section in sections for part in section["parts"]]
        self.rows = [tuple(row) for part in parts for row in (part.get("head"), *part.get("rows", ())) if row]
        self.charts = [part["label"] for part in parts if part["kind"] in ("lines", "bars")]
        self.text = "\n".join(self._texts(sections))

    @property
    def pairs(self):
        return {row[0]: row[1] for row in self.rows if len(row) == 2}

    def _texts(self, value):
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for part in value.values() if isinstance(value, dict) else value:
                yield from self._texts(part)


def report(run_folder, *more):
    """The page and the text of a run, through the command."""
    assert command.main([str(run_folder.path), *more]) == 0
    html = (run_folder.path / "report.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', html)[1])
    page = Page(data["report"]["0"]["sections"][data["language"]])
    return page, (run_folder.path / "report.txt").read_text(encoding="utf-8"), html


MAIN_FIGURES = {
    "Steps done": "20",
    # 2023-11-14 22:13:20 UTC; step 20 is written 200 s after.
    "Wall time": "3 min 20 s from first to last event, from 2023-11-14 22:13 UTC",
    "Mean step": "10.0 s (shortest 10.0 s, longest 10.0 s)",
    # A tenth of 20 steps is 2: (0.01 + 0.02) / 2 and (0.19 + 0.20) / 2.
    "Reward": "0.015 → 0.195 (means of the first and the last 2 steps)",
    # (0.02 + 0.04) / 2 and (0.38 + 0.40) / 2.
    "Reward, fairness": "0.030 → 0.390; reference 0.500",
    "Reward, hallucination": "0.250 → 0.250",
    "KL in band, fairness": "75 % of the steps in 0.02 to 0.06 nats per token; beta 0.05 → 0.05",
    "KL in band, hallucination": "20 % of the steps in 0.02 to 0.06 nats per token; beta 0.1 → 0.1",
    # 20 x 2 and 10 x 1.
    "Failures": "40 of the policy, 8.0 % of the completions, most often missing_field; "
    "10 of services, 2.0 % of the completions, most often rag_8b_timeout",
    "MFU": "31 % while the model computes, 8.0 % of the whole step",
    "Accelerator at work": "34 % of the step",
    "Throughput": "5,000 tokens/s",
    "Memory": "GPU peak 62.0 GiB",
    "Best quick evaluation": "step 10: reward 0.400 (fairness 0.500, hallucination 0.300)",
    "Held-out rows": "reward 0.290 at step 0 → 0.450 at step 20",
}


def test_page_and_text_tell_the_same_main_figures(two_branches):
    page, text, _ = report(two_branches)

    rows = page.pairs
    assert {name: rows[name] for name in MAIN_FIGURES} == MAIN_FIGURES
    lines = dict(line.split("  ", 1) for line in text.splitlines() if line.partition("  ")[0] in MAIN_FIGURES)
    assert {name: value.strip() for name, value in lines.items()} == MAIN_FIGURES


def test_the_tables_hold_the_runs_figures(two_branches):
    page, text, _ = report(two_branches)

    rows = page.rows
    assert ("reward wait", "6.20 s", "62 %") in rows
    assert ("missing field", "the policy", "40", "80 %") not in rows  # a code is not prettified
    assert ("missing_field", "the policy", "40", "80 %") in rows
    assert ("rag_8b_timeout", "services", "10", "20 %") in rows
    # Step 10 beats step 5 and is beaten by none; step 15 is highest in hallucination; step 20 lacks a score.
    # A figure of a user that was asked for in step 5 alone stands before the front.
    assert ("5", "0.300", "0.300", "0.300", "0.25", "", "") in rows
    assert ("10", "0.400", "0.500", "0.300", "n/a", "yes", "yes") in rows
    assert ("15", "0.350", "0.200", "0.500", "n/a", "yes", "") in rows
    assert ("20", "n/a", "0.400", "n/a", "n/a", "", "") in rows
    # The longest of 4 + step is 24.
    assert ("judge", "2.00 s", "4.00 s", "24.0 s", "5.00 s") in rows
    assert ("rag_8b", "n/a", "1.00 s", "n/a", "n/a") in rows
    assert ("20", "0.45", "0.56", "n/a") in rows
    assert "step 10, 15" in text


def test_what_was_spent_is_told_by_service_against_the_limits(two_branches):
    limit = Limit(name="judge_providers[a].max_usd", kind=USD, most=2.0, service="judge_a")
    a = Spent(calls=30, prompt_tokens=9000, completion_tokens=600, usd=0.42)
    with open_account(two_branches.path / SPENT_FILE) as account:
        account.services = {"judge_a": a, "rag_8b": Spent(calls=1200)}
        account.give_back(limit, 0.0)
    page, text, _ = report(two_branches)
    told = "1,230 calls, 0.42 USD; judge_providers[a].max_usd 0.42 of 2"
    assert f"{told}\n" in text
    assert ("Spent", told) in page.rows
    assert ("judge_a", "30", "9,000", "600", "0.4200") in page.rows


def test_what_stands_out_is_told_once_in_both(two_branches):
    page, text, _ = report(two_branches)
    sentences = [line.removeprefix("  - ") for line in text.splitlines() if line.startswith("  - ")]
    assert [sentence.split(":")[0] for sentence in sentences] == [
        "2 updates were skipped because too few completions could be scored",
        "Training waits for rewards during 62 % of the step. The slowest stage is judge (p95 4.00 s)",
        "The KL lay outside its band for most of the run",
        # the services' 2 % are within the usual
        "8.0 % of the completions were no valid action, mostly missing_field (100 % of these). That is the policy's "
        "doing",
        "3.0 % of the step belongs to no phase",
    ]
    assert all(page.text.count(sentence) == 1 for sentence in sentences)
    assert "hallucination (in band 20 %)" in sentences[2]
    assert "fairness" not in sentences[2]


def test_the_page_is_one_file_that_asks_for_nothing_and_has_no_completion(two_branches):
    page, text, html = report(two_branches)

    assert "connect-src 'none'" in html
    assert not re.search(r"<(link|script|img|iframe)[^>]* (href|src)=\"(?!data:)", html)
    assert f"<noscript><pre>{text.splitlines()[0]}" in html
    assert json.loads(re.search(r'id="data">(.*?)</script>', html)[1]).keys() == {"state", "report", "language"}
    two_kls = ["KL, nats per token", "coefficient beta"] * 2
    others = ["seconds per step", "rewards, seconds", "failures per step", "score"]
    assert page.charts == ["mean reward", *two_kls, *others]
    assert len(html) < 200_000


def test_a_run_that_logged_nothing_is_told_in_words(run_folder):
    run_folder.events({})
    page, text, _ = report(run_folder)

    assert page.charts == []
    rows = page.pairs
    assert rows["Steps done"] == "none was logged"
    assert rows["Reward"] == "was not logged"
    assert rows["Failures"] == "were not logged"
    assert rows["MFU"].startswith("n/a")
    for sentence in (
        "No training figure was logged, so there is nothing to look at.",
        "No reward was logged.",
        "No KL was logged",
        "Step times were not logged.",
        "Failures were not logged.",
        "No quick evaluation was made.",
        "How long the stages took was not logged.",
        "No held-out evaluation was written.",
    ):
        assert sentence in page.text
    assert "no quick evaluation was made" in text


def test_one_step_and_one_branch_without_kl(run_folder):
    for start in (0.0, 3600.0):  # a resume after an hour
        figures = {"reward": 0.3, "reward/a": 0.3, "outcome/ok": 1.0, "time/step_s": 2.0}
        run_folder.events({1: figures}, started_s=1_700_000_000.0 + start)
    run_folder.quick_evals({"step": 1, "mode": "greedy", "reward": 0.3, "branches": {"a": {"score": 0.3}}})
    page, text, _ = report(run_folder)

    rows = page.pairs
    assert rows["Reward"] == "0.300 (one step)"
    assert rows["Wall time"].startswith("1 h 0 min")
    assert rows["Wall time"].endswith("2 starts (steps 1, 1), with the time between them")
    assert not rows.keys() & {"Reward, a", "KL in band, a", "KL in band"}  # it has one branch, and no KL
    assert "Model at work" in rows and "Accelerator at work" not in rows  # no GPU's memory was logged
    assert rows["Failures"] == "none"
    assert "Every completion was scored: there were no failures." in page.text
    assert "Nothing stands out" in page.text
    assert "Nothing stands out" in text
    # Reward, and the score over the steps. Of its 2 s no part is known.
    assert page.charts == ["mean reward", "score"]
    assert re.search(r"Time by phase +was not logged", text)


def test_text_from_files_is_escaped_and_cannot_steer_a_terminal(run_folder):
    evil = '<script>alert("1")</script>'
    run_folder.events(
        {1: {f"reward/{evil}": 0.1, f"kl/{evil}": 0.1, f"failures/reason/{evil}": 1.0, "failures/reason/\x1b[2J": 2.0}}
    )
    run_folder.quick_evals({"step": 1, "mode": evil, "reward": 0.1, "branches": {evil: {"score": 0.1}}})
    run_folder.held_out({"step": 0, "reward": 0.1, evil: 0.2})
    page, text, html = report(run_folder)

    assert evil in page.text
    assert "<script>alert" not in html
    assert "\x1b" not in html + text
    assert "?[2J" in text


def test_the_text_keeps_to_forty_lines_however_much_there_is(run_folder):
    branches = [f"branch{number}" for number in range(12)]
    step = {
        "reward": 0.1,
        "time/step_s": 26.0,
        "outcome/ok": 0.1,
        "failures/skipped_update": 1.0,
        "kl/a": float("inf"),
    }
    step |= {f"time/{phase}_s": 2.0 for phase in Phase} | {f"time/{stage}_p95_s": 1.0 for stage in Stage}
    step |= {"time/reward_wait_s": 9.0}
    for branch in branches:
        step |= {f"reward/{branch}": 0.1, f"kl/{branch}": 0.1, f"kl/{branch}_in_band": 0.0, f"beta/{branch}": 0.1}
    step |= {f"failures/reason/r{number}": 1.0 for number in range(50)}
    run_folder.events({1: step, 2: step})
    scores = {branch: {"score": 0.1} for branch in branches}
    run_folder.quick_evals(
        *({"step": at, "mode": "greedy", "reward": 0.1, "branches": scores} for at in range(100)), cut_off="{"
    )

    with open_account(run_folder.path / SPENT_FILE) as account:
        account.services = {"judge": Spent(calls=1)}
    run = read_run(run_folder.path)
    lines = text_page(run).splitlines()
    assert len(lines) <= 40
    assert "alarms" not in text_page(run).lower()  # there was no meter
    assert "More branches" in text_page(run)
    assert re.search("Note +2 figures were infinite, left out; 1 line of quick_eval.jsonl", text_page(run))
    assert sum(line.startswith("  - ") for line in lines) == 5
    run_folder.events({3: {**step, JUDGE_ALARMS: 2.0}})
    lines = text_page(read_run(run_folder.path)).splitlines()
    assert len(lines) <= 40 and any("Alarms of the judge's meter" in line and "2" in line for line in lines)
    # The page has every branch, and its tables are bounded.
    page = Page(sections(run)["en"])
    assert all(f"Reward, {branch}" in page.text for branch in branches)
    assert len(page.rows) < 150


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no folder", "is no folder"),
        ("no event file", "holds no TensorBoard file"),
        ("several runs", "runs of other folders: debug, full"),
        ("a file", "is no folder"),
    ],
)
def test_bad_input_is_exit_code_2_with_one_message_and_no_file(run_folder, capsys, case, words):
    folder = run_folder.path
    if case == "no folder":
        folder = folder / "nowhere"
    if case == "several runs":
        for name in ("debug", "full"):
            run_folder.events({1: {"reward": 0.1}}, where=f"{name}/runs/host")
    if case == "a file":
        folder = folder / "file"
        folder.write_text("")
    assert command.main([str(folder)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert words in told.err
    assert "Expected" in told.err
    assert not (run_folder.path / "report.html").exists()


def test_the_command_writes_where_it_is_told(run_folder, tmp_path, capsys):
    file = run_folder.events(
        {1: {"reward": 0.25, "reward/fairness": 0.25}, 2: {"reward": 0.25}}, where="../boards/host"
    )
    html, text = tmp_path / "out" / "page.html", tmp_path / "out" / "page.txt"
    words = ["--html", str(html), "--text", str(text), "--logging_dir", str(file.parents[1])]
    assert command.main([str(run_folder.path), *words]) == 0
    assert capsys.readouterr().out == f"{text.read_text(encoding='utf-8')}\nPage: {html}\nText: {text}\n"
    assert "mean reward" in html.read_text(encoding="utf-8")
    assert list(run_folder.path.iterdir()) == []


def test_failed_calls_for_groups_in_the_middle_of_a_run_are_told(run_folder):
    run_folder.events({step: {"judge/judged_singly": count} for step, count in enumerate((0.0, 8.0, 1.0, 0.0), 1)})
    page, _, _ = report(run_folder)
    rows = page.pairs
    assert rows["Judged one by one after a failed call"] == "2.250 on average, 8.000 at most"
    page, _, _ = report(run_folder, "--lang", "zh")
    assert page.pairs["整组评判失败后逐条评判"] == "平均 2.250，最多 8.000"


def test_the_page_in_chinese_has_no_english_sentence_left(two_branches, tmp_path):
    """Names, units, codes and paths stay as they are."""
    evals = (two_branches.path / "quick_eval.jsonl").read_text("utf-8")
    (two_branches.path / "quick_eval.jsonl").write_text(evals + "{\n", "utf-8")
    empty = type(two_branches)(tmp_path / "empty")
    empty.path.mkdir()
    empty.events({})
    for folder in (two_branches, empty):
        page, *_ = report(folder, "--lang", "zh")
        assert not re.findall(r"\b(?:the|of|was|is|no|and|steps?|mean|reward|over)\b", page.text)


def test_chinese_is_looked_up_in_the_parts_of_a_text():
    assert in_language("5,000 tokens/s, 3.43 samples/s", "zh") == "每秒 5,000 个词元，每秒 3.43 条样本"
    assert in_language("Reward, my_branch", "zh") == "奖励，my_branch"
    assert in_language("my own name", "zh") == "my own name"
    assert in_language("a (in band 0 %), b (in band 5 %)", "zh") == "a（在区间内 0 %），b（在区间内 5 %）"
