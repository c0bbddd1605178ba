"""From rewards and a batch's report to figures."""

import math

import pytest
import torch

from salesrl_trl.reward.batch import BatchReport
from salesrl_trl.reward.figures import FIRST, SECOND, RewardFigures
from salesrl_trl.reward.scorer import RewardNames
from salesrl_trl.service.transport import TRAFFIC
from salesrl_trl.telemetry.perf import StepAggregates
from salesrl_trl.types import Outcome, ProviderUsage, Reward

BRANCHES = ("fairness", "hallucination")
FIGURES = RewardFigures(BRANCHES)
NAMES = FIGURES.names()


def ok(value, reference=None):
    return Reward(outcome=Outcome.OK, value=value, components={"judge": value, "reference": reference})


INVALID = Reward(outcome=Outcome.INVALID_ACTION, value=0.0, reason="not_json")
INFRA = Reward(outcome=Outcome.INFRA, value=None, reason="rag_8b_timeout")


def means_of(*batches):
    means = StepAggregates(NAMES)
    for rewards, branch_ids in batches:
        FIGURES.add_rewards(means, FIGURES.encode(rewards, branch_ids))
    return means


def test_a_branchs_mean_is_over_its_scored_completions_only():
    flushed = means_of(([ok(1.0), INVALID, INFRA, ok(0.5)], [0, 0, 0, 1])).flush()
    assert flushed["reward/fairness"] == 0.5  # (1 + 0) / 2; the failed call counts nowhere
    assert flushed["reward/hallucination"] == 0.5


def test_a_missing_reference_is_counted_among_the_judged_only():
    flushed = means_of(([ok(1.0, 0.5), ok(1.0), INFRA, INVALID], [0, 0, 0, 0])).flush()
    assert flushed["failures/reference_missing"] == 0.5
    assert flushed["reference/fairness"] == 0.5


def test_the_keys_are_the_same_when_a_branch_or_everything_is_missing_and_an_empty_branch_is_nan():
    assert len(FIGURES.encode([], [])) == 0
    for batches in ([([ok(1.0)], [0])], [([INFRA], [1])], [([], [])], []):
        flushed = means_of(*batches).flush()
        assert set(flushed) == set(NAMES)
        assert math.isnan(flushed["reward/hallucination"])


def test_two_ranks_gathered_give_what_one_rank_would():
    rewards, branch_ids = [ok(0.2), ok(0.4), INFRA, ok(0.9)], [0, 1, 0, 0]
    one = means_of((rewards, branch_ids)).flush()
    two = StepAggregates(NAMES)
    parts = [(rewards[:2], branch_ids[:2]), (rewards[2:], branch_ids[2:])]
    FIGURES.add_rewards(two, torch.cat([FIGURES.encode(*part) for part in parts]))
    assert two.flush() == pytest.approx(one, nan_ok=True)


def test_reports_of_ranks_are_summed_and_their_times_are_the_slowest():
    traffic = {"rag_8b": {**dict.fromkeys(TRAFFIC, 0), "sent": 4, "overloads": 1, "slots": 8}}
    usage, hits = {"openai": ProviderUsage(verdicts=2, usd=0.25)}, {"answers": 1, "references": 0}
    reports = [
        BatchReport(seconds=seconds, judge_seconds=seconds / 2, usage=usage, traffic=traffic, cache_hits=hits)
        for seconds in (1.0, 3.0)
    ]
    figures_of = RewardFigures(BRANCHES, RewardNames(providers=("openai",), services=("rag_8b",)))
    means = StepAggregates((*figures_of.names(), FIRST, SECOND))
    figures_of.add_report(means, torch.cat([figures_of.encode_report(report) for report in reports]))
    figures = means.flush()
    assert (figures["time/reward_s"], figures["time/judge_s"]) == (3.0, 1.5)
    assert (figures["judge/openai/verdicts"], figures["judge/openai/usd"]) == (4.0, 0.5)
    assert (figures["services/rag_8b/sent"], figures["services/rag_8b/slots"]) == (8.0, 16.0)
    assert figures["services/rag_8b/overload_share"] == 0.25  # 2 of 8
    assert (figures["cache/answers_saved"], figures["cache/references_saved"]) == (2.0, 0.0)


def test_stages_are_told_by_percentile():
    def timed(rag_8b, rag_32b, judge):
        seconds = {"parse": 0.001, "rag_8b": rag_8b, "rag_32b": rag_32b, "judge": judge}
        return Reward(outcome=Outcome.OK, value=0.5, seconds=seconds)

    rewards = [timed(1.0, 0.5, 4.0), timed(1.0, 3.0, 1.0), timed(2.0, 0.1, 2.0)]
    invalid = Reward(outcome=Outcome.INVALID_ACTION, value=0.0, reason="not_json", seconds={"parse": 0.004})
    flushed = means_of(([*rewards, invalid], [0, 0, 1, 1])).flush()
    assert [flushed[f"time/judge_{share}_s"] for share in ("p50", "p95", "max")] == [2.0, 4.0, 4.0]
    assert flushed["time/parse_max_s"] == 0.004
