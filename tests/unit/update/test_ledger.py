"""The figures of a log line, without a trainer, a model or a process group."""

import math
from collections import Counter

import pytest
import torch

from salesrl_trl.kl.controller import KLControl, WindowSettings
from salesrl_trl.kl.law import KLTarget
from salesrl_trl.reward.batch import BatchReport
from salesrl_trl.reward.figures import encode, encode_report
from salesrl_trl.reward.judge.judge_client import JudgeRecord
from salesrl_trl.types import Outcome, Reward
from salesrl_trl.update.ledger import Ledger

GOOD = Reward(outcome=Outcome.OK, value=0.75, components={"judge": 0.75, "reference": 0.5})
BAD = Reward(outcome=Outcome.INFRA, value=None, reason="rag_8b_timeout")


@pytest.fixture
def ledger():
    return Ledger(["a"], with_kl=True, with_baseline=True)


def record(ledger, mode, *rewards):
    ledger.record_rewards(mode, encode(rewards, [0] * len(rewards)), [each.reason for each in rewards if each.reason])


def measured(figures):
    return {name: figure for name, figure in figures.items() if not math.isnan(figure)}


def test_a_line_has_the_names_that_dashboards_rely_on_in_their_order():
    names = list(Ledger(["a"], ["openai"], ["rag_8b"], with_kl=True, with_baseline=True).flush("train"))
    stages = [f"time/{stage}_{share}_s" for stage in ("parse", "rag_8b", "rag_32b", "judge")
              for share in ("p50", "p95", "max")]  # fmt: skip
    slowest = [f"time/slowest_{stage}_s" for stage in ("parse", "rag_8b", "rag_32b", "judge")]
    traffic = ("calls", "sent", "retries", "overloads", "timeouts", "failures", "held_back", "hedges", "hedges_won",
               "slots")  # fmt: skip
    assert names == [
        "reward/a", "reference/a",
        "outcome/ok", "outcome/invalid_action", "outcome/judge_invalid", "outcome/infra",
        "failures/reference_missing", "retrieval/right_document", "failures/skipped_update", "failures/single_scored",
        "rollout/staleness", "rollout/staleness_max", "rollout/left_out", "rollout/bounded",
        "time/reward_s", "time/judge_s", *stages, *slowest,
        *(f"judge/openai/{figure}" for figure in ("verdicts", "prompt_tokens", "completion_tokens", "usd")),
        *(f"services/rag_8b/{figure}" for figure in traffic),
        "cache/answers_saved", "cache/references_saved",
        "kl", "beta/a", "kl/a", "kl/a_k1", "kl/a_in_band", "kl/a_share_in_band", "kl/a_clamped", "kl/a_tokens",
        "kl/a_low", "kl/a_high", "kl/a_update_share",
            "failures/baseline_fallback", "judge/length_correlation", "judge/position_gap",
    ]  # fmt: skip


def test_what_was_recorded_of_a_step_is_in_its_line_and_not_in_the_next(ledger):
    record(ledger, "train", GOOD, BAD)
    ledger.record_groups(torch.tensor([True, False, True, True]), 2)
    ledger.record_update("train", is_skipped=True)
    for steps in (1, 2):
        ledger.record_staleness("train", steps)
    ledger.record_correction("train", 1.0, 2.0, 8.0)
    ledger.record_baselines(torch.tensor([True, False, False, False]))
    control = KLControl({"a": KLTarget(beta=0.1)}, None, WindowSettings())
    ledger.record_kl("train", [[0.4, 0.2, 0.0, 4.0, 4.0]], [0.1], [1.0], control)
    names = ("reward/a", "outcome/infra", "failures/single_scored", "failures/skipped_update", "rollout/staleness",
             "rollout/staleness_max", "rollout/left_out", "rollout/bounded", "failures/baseline_fallback", "kl/a",
             "beta/a")  # fmt: skip
    figures = ledger.flush("train")
    assert [figures[name] for name in names] == [0.75, 0.5, 0.5, 1.0, 1.5, 2, 0.125, 0.25, 0.25, 0.1, 0.1]
    assert measured(ledger.flush("train")) == {}


def test_a_report_brings_times_and_the_judges_bias():
    verdicts = [JudgeRecord(score=score, chars=chars, candidate_first=None) for score, chars in ((0.2, 10), (0.4, 20))]
    report = BatchReport(seconds=3.0, judge_seconds=1.0, usage={}, traffic={}, records=verdicts,
                         cache_hits={"answers": 0, "references": 0})  # fmt: skip
    ledger = Ledger(["a"])
    ledger.record_report("train", encode_report(report))
    figures = ledger.flush("train")
    assert (figures["time/reward_s"], figures["judge/length_correlation"]) == (3.0, pytest.approx(1.0))


def test_a_reason_of_training_has_a_count_in_each_line_after_it_came_first(ledger):
    record(ledger, "train", BAD, BAD)
    record(ledger, "eval", BAD)
    assert ledger.failures("train") == {"rag_8b_timeout": 2}
    assert ledger.drain_failures("eval") == {}
    assert ledger.drain_failures("train") == {"failures/reason/rag_8b_timeout": 2}
    assert ledger.drain_failures("train") == {"failures/reason/rag_8b_timeout": 0}


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_recorded_aside_leaves_no_trace(ledger, fails):
    for mode in ("train", "eval"):
        record(ledger, mode, BAD)
    try:
        with ledger.aside("eval"):
            assert ledger.failures("eval") == Counter()
            record(ledger, "eval", GOOD, GOOD)
            record(ledger, "train", GOOD)
            assert ledger.flush("eval")["outcome/ok"] == 1
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert ledger.failures("eval") == {"rag_8b_timeout": 1}
    assert ledger.flush("eval")["outcome/ok"] == 0
    assert ledger.flush("train")["outcome/ok"] == 0.5


def test_the_rewards_of_an_evaluation_are_kept_by_completion_without_those_aside(ledger):
    record(ledger, "eval", GOOD, BAD)
    with ledger.aside("eval"):
        record(ledger, "eval", GOOD)
    record(ledger, "train", GOOD)
    ledger.flush("eval")  # the line is logged before the rewards are asked for
    record(ledger, "eval", GOOD)
    first, second, third = ledger.drain_eval_rewards()
    assert (first, math.isnan(second), third) == (0.75, True, 0.75)
    assert ledger.drain_eval_rewards() == []


def test_after_a_clear_nothing_of_an_earlier_run_is_left(ledger):
    record(ledger, "train", BAD)
    ledger.clear()
    assert ledger.failures("train") == Counter()
    assert measured(ledger.flush("train")) == {}
