"""The figures of a log line, without a trainer, a model or a process group."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from salesrl_trl.kl.branched import KLControl, WindowSettings
from salesrl_trl.kl.law import KLTarget
from salesrl_trl.names import SINGLE_SCORED, SKIPPED_UPDATE
from salesrl_trl.reward.batch import NOTHING_SCORED, BatchReport
from salesrl_trl.reward.figures import RewardFigures
from salesrl_trl.types import JudgeRecord, Outcome, Reward
from salesrl_trl.update.ledger import Ledger

GOOD = Reward(outcome=Outcome.OK, value=0.75, components={"judge": 0.75, "reference": 0.5})
BAD = Reward(outcome=Outcome.INFRA, value=None, reason="rag_8b_timeout")


FIGURES = RewardFigures(["a"])


@pytest.fixture
def ledger():
    return Ledger(FIGURES, with_kl=True, further=["baseline"])


def record(ledger, mode, *rewards, report=NOTHING_SCORED):
    reasons = [each.reason for each in rewards if each.reason]
    ledger.record_rewards(mode, FIGURES.encode(rewards, [0] * len(rewards)), FIGURES.encode_report(report), reasons)


def measured(figures):
    return {name: figure for name, figure in figures.items() if not math.isnan(figure)}


def test_what_was_recorded_of_a_step_is_in_its_line_and_not_in_the_next(ledger):
    record(ledger, "train", GOOD, BAD)
    ledger.add("train", SINGLE_SCORED, 1, 2)
    ledger.add("train", SKIPPED_UPDATE, 1.0)
    control = KLControl({"a": KLTarget(beta=0.1)}, None, WindowSettings())
    ledger.record_kl("train", [[0.4, 0.2, 0.0, 4.0, 4.0]], [0.1], [1.0], control)
    names = ("reward/a", "outcome/infra", "failures/single_scored", "failures/skipped_update", "kl/a", "beta/a")
    figures = ledger.flush("train")
    assert [figures[name] for name in names] == [0.75, 0.5, 0.5, 1.0, 0.1, 0.1]
    assert measured(ledger.flush("train")) == {}


def test_a_report_brings_times_and_the_judges_gap_between_first_and_second():
    placed = ((0.8, True), (0.6, True), (0.5, False), (0.9, None))  # the last had nothing beside it
    verdicts = [JudgeRecord(score=score, candidate_first=first) for score, first in placed]
    report = BatchReport(seconds=3.0, judge_seconds=1.0, usage={}, traffic={}, records=verdicts,
                         cache_hits={"answers": 0, "references": 0})  # fmt: skip
    ledger = Ledger(FIGURES)
    record(ledger, "train", report=report)
    figures = ledger.flush("train")
    assert (figures["time/reward_s"], figures["judge/position_gap"]) == (3.0, pytest.approx(0.2))
    record(ledger, "train", report=replace(report, records=verdicts[:2]))
    assert math.isnan(ledger.flush("train")["judge/position_gap"])


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
    (first, second, third), _ = ledger.drain_evaluated()
    assert (first, math.isnan(second), third) == (0.75, True, 0.75)
    assert ledger.drain_evaluated() == ([], [])


def test_after_a_clear_nothing_of_an_earlier_run_is_left(ledger):
    record(ledger, "train", BAD)
    ledger.clear()
    assert ledger.failures("train") == Counter()
    assert measured(ledger.flush("train")) == {}


def test_a_band_is_drawn_where_there_is_a_kl_and_nowhere_else():
    """TensorBoard draws a band over equal steps alone."""
    targets = {"fairness": KLTarget(beta=0.1, low=0.02, high=0.06), "hallucination": KLTarget(beta=0.1)}
    control = KLControl(targets, None, WindowSettings())
    ledger = Ledger(RewardFigures([*targets]), with_kl=True)
    # ten tokens each; the second branch's weigh 5 together, by the ratio to the policy that sampled them
    sums = [[0.3, 0.2, 1.0, 10.0, 10.0], [0.3, 0.2, 1.0, 10.0, 5.0]]
    ledger.record_kl("train", sums, [0.1, 0.1], [1.0, 0.5], control)
    figures = ledger.flush("train")
    assert figures["kl/fairness"] == 0.03
    assert (figures["kl/hallucination"], figures["kl/hallucination_penalty"]) == (0.06, 0.04)
    assert (figures["kl/hallucination_clamped"], figures["kl/hallucination_tokens"]) == (0.1, 10)
    assert figures["kl"] == pytest.approx(0.4 / 15)
    assert (figures["kl/fairness_low"], figures["kl/fairness_high"]) == (0.02, 0.06)
    assert math.isnan(figures["kl/hallucination_low"])  # it has none
    assert (figures["kl/fairness_update_share"], figures["kl/hallucination_update_share"]) == (1.0, 0.5)
    ledger.record_kl("train", [[0.0] * 5, sums[0]], [0.1, 0.1], [1.0, 0.5], control)  # no row of fairness
    figures = ledger.flush("train")
    assert all(math.isnan(figures[f"kl/fairness{edge}"]) for edge in ("", "_low", "_high"))
