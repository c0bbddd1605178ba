"""A figure of one's own in quick evaluations is one class outside the package, by its dotted path or as an object."""

import json
import logging

import pytest
from support.answers import WrittenSubject, answered, quick_evaluations
from support.loopback import Services
from support.scripted import build_trainer, default_rows, loopback_reward

from salesrl_trl.config.quick_evaluations import QuickEvalSettings
from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.evaluation.quick_record import QuickEvalHistory
from salesrl_trl.launch.settings import TelemetryConfig


class Questions:
    """Share of answers with a question."""

    name, form = "questions", ".0%"

    def __call__(self, answers):
        return sum("?" in each.text for each in answers) / len(answers)


QUESTIONS = f"{__name__}.Questions"


def script(*texts):
    """Answers of fairness, then one of hallucination; all of them with the same reward."""
    *fairness, hallucination = texts
    return [
        *(answered("fairness", 0.5, text=text) for text in fairness),
        answered("hallucination", 0.5, hallucination),
    ]


def test_it_stands_in_the_record_the_line_and_the_log_and_selects_the_best_policy(tmp_path, caplog, monkeypatch):
    settings = TelemetryConfig(quick_eval_steps=1, quick_eval_best="questions", quick_eval_figures=[QUESTIONS])
    settings.check_branches(["fairness", "hallucination"])
    scripts = {1: script("No.", "Why?", "No."), 2: script("Why?", "How?", "No."), 3: script("No.", "No.")}
    subject = WrittenSubject(scripts)
    evaluator = quick_evaluations(monkeypatch, subject, tmp_path, settings.quick_eval())
    evaluator.load_state_dict({})
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        for subject.step in (1, 2, 3):
            evaluator.after_step(subject.step)
    records = [json.loads(line) for line in (tmp_path / "quick_eval.jsonl").read_text().splitlines()]
    assert [record["branches"]["fairness"]["questions"] for record in records] == [0.5, 1.0, 0.0]
    assert [record["figures"]["questions"] for record in records] == pytest.approx([1 / 3, 2 / 3, 0.0])
    assert [record["best"] for record in records] == [False, True, False]
    assert any(line.endswith("beta F=0.1 H=n/a questions F=50% H=0%") for line in caplog.messages)
    assert f"[Best@2] questions 0.667, saved in {tmp_path / 'best'}" in caplog.messages
    assert subject.logged[1]["quick_eval/fairness/questions"] == 0.5
    assert subject.logged[1]["quick_eval/questions"] == pytest.approx(1 / 3)
    assert json.loads((tmp_path / "best/quick_eval.json").read_text())["step"] == 2


def test_a_resumed_run_reads_a_record_from_before_the_figure_was_asked_for(tmp_path):
    history = QuickEvalHistory(tmp_path / "quick_eval.jsonl", "questions", 0.5)
    branches = {"fairness": {"rows": 1, "scored": 1, "score": 0.5, "truncated": 0, "length": 9, "kl": 0, "beta": 0}}
    old = {"step": 1, "reward": 0.5, "branches": branches, "seconds": 1.0, "mode": "greedy"}
    history.resume([old, {**old, "step": 2, "figures": {"questions": 0.1}}], 2)
    assert history.best.step == 2  # the first one has no such figure


def test_two_figures_or_a_branch_with_one_name_are_refused():
    with pytest.raises(ConfigError, match=r"'questions'\. Expected letters"):
        TelemetryConfig(quick_eval_figures=[QUESTIONS]).check_branches(["fairness", "questions"])
    with pytest.raises(ConfigError, match=r"'questions'\. Expected one of: reward, worst_branch, fairness\."):
        TelemetryConfig(quick_eval_best="questions").check_branches(["fairness"])


class WithAQuery:
    """Share of answers whose text names a query, among those with a reward."""

    name, form = "with_a_query", ".0%"

    def __call__(self, answers):
        scored = [each for each in answers if each.reward.value is not None]
        return sum("rewritten_query" in each.text for each in scored) / len(scored) if scored else None


def test_a_trainer_takes_a_figure_as_an_object(tiny, httpserver, tmp_path):
    rows = default_rows()
    reward = loopback_reward(Services(httpserver), rows)
    texts = ('{"user_profile": "", "rewritten_query": "Price?", "history_summary": ""}', "hello")

    def build(*figures):
        quick = QuickEvalSettings(steps=1, rows=4, best="with_a_query", figures=figures)
        return build_trainer(tiny, reward, texts, rows, tmp_path / "run", quick_eval=quick, max_steps=1, beta=0.0)

    with pytest.raises(ConfigError, match="has the name 'with_a_query'"):
        build(WithAQuery(), WithAQuery())
    trainer = build(WithAQuery())
    trainer.train()
    trainer.finish()
    (logged,) = [entry for entry in trainer.state.log_history if "quick_eval/with_a_query" in entry]
    # rows come branch by branch in turn, and so do the two texts
    assert logged["quick_eval/fairness/with_a_query"] == 1.0
    assert logged["quick_eval/hallucination/with_a_query"] == 0.0
    assert logged["quick_eval/with_a_query"] == 0.5
    assert (tmp_path / "run/best/model.safetensors").is_file()
