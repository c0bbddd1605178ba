"""A figure of one's own in quick evaluations is one class outside the package, by its dotted path or as an object."""

import json
import logging

import pytest
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


def test_a_trainer_takes_figures_as_objects_and_by_their_dotted_paths(tiny, httpserver, tmp_path, caplog):
    rows = default_rows()
    reward = loopback_reward(Services(httpserver), rows)
    texts = ('{"user_profile": "", "rewritten_query": "Price?", "history_summary": ""}', "hello")

    def build(*figures):
        quick = QuickEvalSettings(steps=1, rows=4, best="with_a_query", figures=figures)
        return build_trainer(tiny, reward, texts, rows, tmp_path / "run", quick_eval=quick, max_steps=1, beta=0.0)

    with pytest.raises(ConfigError, match="has the name 'with_a_query'"):
        build(WithAQuery(), WithAQuery())
    by_path = TelemetryConfig(quick_eval_steps=1, quick_eval_figures=[QUESTIONS]).quick_eval().figures
    trainer = build(WithAQuery(), *by_path)
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        trainer.train()
    trainer.finish()
    (logged,) = [entry for entry in trainer.state.log_history if "quick_eval/with_a_query" in entry]
    (record,) = map(json.loads, (tmp_path / "run/quick_eval.jsonl").read_text().splitlines())
    assert (record["figures"]["with_a_query"], record["branches"]["fairness"]["with_a_query"]) == (0.5, 1.0)
    assert "with_a_query F=100% H=0%" in caplog.text and "[Best@1] with_a_query 0.500" in caplog.text
    # rows come branch by branch in turn, and so do the two texts
    assert logged["quick_eval/fairness/with_a_query"] == 1.0
    assert logged["quick_eval/hallucination/with_a_query"] == 0.0
    assert logged["quick_eval/with_a_query"] == logged["quick_eval/questions"] == 0.5
    assert (tmp_path / "run/best/model.safetensors").is_file()
