"""From per-completion outcomes to figures."""

import math

import pytest
import torch

from salesrl_trl.kl.controller import KLControl, KLTarget
from salesrl_trl.reward.batch import BatchReport
from salesrl_trl.reward.judge.client import JudgeRecord
from salesrl_trl.reward.judge.provider import ProviderUsage
from salesrl_trl.reward.service.transport import TRAFFIC
from salesrl_trl.telemetry.metrics import (
    LENGTH_CORRELATION,
    POSITION_GAP,
    JudgeBias,
    Means,
    add_kl,
    add_report,
    add_rewards,
    bias_sums,
    encode,
    encode_report,
    kl_names,
    metric_names,
    percentile,
    report_names,
)
from salesrl_trl.types import Outcome, Reward

BRANCHES = ("fairness", "hallucination")


def ok(value, reference=None):
    return Reward(outcome=Outcome.OK, value=value, components={"judge": value, "reference": reference})


INVALID = Reward(outcome=Outcome.INVALID_ACTION, value=0.0, reason="not_json")
INFRA = Reward(outcome=Outcome.INFRA, value=None, reason="rag_8b_timeout")
JUDGE = Reward(outcome=Outcome.JUDGE_INVALID, value=None, reason="judge_empty")


def means_of(*batches):
    means = Means(metric_names(BRANCHES))
    for rewards, branch_ids in batches:
        add_rewards(means, encode(rewards, branch_ids), BRANCHES)
    return means


def test_a_branchs_mean_is_over_its_scored_completions_only():
    flushed = means_of(([ok(1.0), INVALID, INFRA, ok(0.5)], [0, 0, 0, 1])).flush()
    assert flushed["reward/fairness"] == 0.5  # (1 + 0) / 2; the failed call counts nowhere
    assert flushed["reward/hallucination"] == 0.5


def test_outcomes_are_shares_of_all_completions():
    flushed = means_of(([ok(1.0), INVALID, INFRA, JUDGE], [0, 0, 0, 1])).flush()
    assert [flushed[f"outcome/{outcome.value}"] for outcome in Outcome] == [0.25, 0.25, 0.25, 0.25]


def test_batches_of_unequal_size_weigh_by_their_size():
    flushed = means_of(([ok(1.0)], [0]), ([ok(0.0)] * 3, [0, 0, 0])).flush()
    assert flushed["reward/fairness"] == 0.25  # (1 + 0 + 0 + 0) / 4, not (1 + 0) / 2


def test_a_missing_reference_is_counted_among_the_judged_only():
    flushed = means_of(([ok(1.0, 0.5), ok(1.0), INFRA, INVALID], [0, 0, 0, 0])).flush()
    assert flushed["failures/reference_missing"] == 0.5
    assert flushed["reference/fairness"] == 0.5


def test_the_keys_are_the_same_when_a_branch_or_everything_is_missing():
    names = set(metric_names(BRANCHES))
    assert set(means_of(([ok(1.0)], [0])).flush()) == names
    assert set(means_of(([INFRA], [1])).flush()) == names
    assert set(means_of().flush()) == names


def test_an_empty_branch_is_nan_and_not_a_number():
    assert math.isnan(means_of(([ok(1.0)], [0])).flush()["reward/hallucination"])


def test_a_flush_starts_over():
    means = means_of(([ok(1.0)], [0]))
    means.flush()
    assert math.isnan(means.flush()["reward/fairness"])


def test_an_empty_batch_encodes_to_no_rows():
    assert encode([], []).shape == (0, 9)


def test_two_ranks_gathered_give_what_one_rank_would():
    rewards, branch_ids = [ok(0.2), ok(0.4), INFRA, ok(0.9)], [0, 1, 0, 0]
    one = means_of((rewards, branch_ids)).flush()
    two = Means(metric_names(BRANCHES))
    gathered = torch.cat([encode(rewards[:2], branch_ids[:2]), encode(rewards[2:], branch_ids[2:])])
    add_rewards(two, gathered, BRANCHES)
    assert two.flush() == pytest.approx(one, nan_ok=True)


def record(score, chars, first=None):
    return JudgeRecord(score=score, chars=chars, candidate_first=first)


def bias_over(*batches):
    """The figures over batches of verdicts, as if each came from a rank of its own."""
    bias = JudgeBias()
    for records in batches:
        bias.add(torch.tensor(bias_sums(records), dtype=torch.float64))
    return bias.flush()


@pytest.mark.parametrize(
    ("scores", "correlation"),
    [
        ((0.1, 0.2, 0.3, 0.4), 1.0),
        ((0.4, 0.3, 0.2, 0.1), -1.0),
        ((0.1, 0.3, 0.3, 0.1), 0.0),
        # lengths 10 ... 40: deviations -15, -5, 5, 15; scores: -0.15, 0.15, -0.05, 0.05 (mean 0.25).
        # sum xy = 2.25 - 0.75 - 0.25 + 0.75 = 2.0; sqrt(500 x 0.05) = 5: 0.4
        ((0.1, 0.4, 0.2, 0.3), 0.4),
    ],
)
def test_the_length_correlation_is_pearsons_over_all_ranks(scores, correlation):
    records = [record(score, 10 * (index + 1)) for index, score in enumerate(scores)]
    for batches in ((records,), (records[:1], records[1:])):
        assert bias_over(*batches)[LENGTH_CORRELATION] == pytest.approx(correlation, abs=1e-9)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [record(0.5, 10)],
        [record(0.1 + 0.2, 10), record(0.3, 20)],
        [record(0.1, 1_000_000), record(0.9, 1_000_000)],
    ],
    ids=["none", "one", "equal scores", "equal lengths"],
)
def test_where_nothing_varies_there_is_no_correlation(records):
    assert math.isnan(bias_over(records)[LENGTH_CORRELATION])


def test_the_position_gap_is_first_less_second():
    records = [record(0.8, 10, True), record(0.6, 10, True), record(0.5, 10, False), record(0.9, 10)]
    assert bias_over(records)[POSITION_GAP] == pytest.approx(0.2)  # 0.7 - 0.5; the last had nothing beside it
    assert math.isnan(bias_over(records[:2])[POSITION_GAP])


def test_the_bias_starts_over_with_a_flush():
    bias = JudgeBias()
    bias.add(torch.tensor(bias_sums([record(0.1, 10), record(0.9, 20)]), dtype=torch.float64))
    bias.flush()
    assert math.isnan(bias.flush()[LENGTH_CORRELATION])


def test_reports_of_ranks_are_summed_and_their_times_are_the_slowest():
    traffic = {"rag_8b": {**dict.fromkeys(TRAFFIC, 0), "sent": 3, "slots": 8}}
    reports = [
        BatchReport(
            seconds=seconds,
            judge_seconds=seconds / 2,
            usage={"openai": ProviderUsage(verdicts=2, usd=0.25)},
            traffic=traffic,
            records=[],
            cache_hits={"answers": 1, "references": 0},
        )
        for seconds in (1.0, 3.0)
    ]
    names = report_names(["openai"], ["rag_8b"])
    means, bias = Means((*metric_names(["fairness"]), *names)), JudgeBias()
    add_report(means, bias, torch.cat([encode_report(report) for report in reports]), names)
    figures = means.flush()
    assert (figures["time/reward_s"], figures["time/judge_s"]) == (3.0, 1.5)
    assert (figures["judge/openai/verdicts"], figures["judge/openai/usd"]) == (4.0, 0.5)
    assert (figures["services/rag_8b/sent"], figures["services/rag_8b/slots"]) == (6.0, 16.0)
    assert (figures["cache/answers_saved"], figures["cache/references_saved"]) == (2.0, 0.0)


@pytest.mark.parametrize(
    ("share", "value"),
    [(0.5, 2.0), (0.51, 3.0), (0.75, 3.0), (0.95, 4.0), (1.0, 4.0)],
)
def test_a_percentile_is_the_value_at_or_below_which_the_share_lies(share, value):
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == value


def test_stages_are_told_by_percentile_and_the_slowest_completion_by_its_split():
    def timed(rag_8b, rag_32b, judge):
        seconds = {"parse": 0.001, "rag_8b": rag_8b, "rag_32b": rag_32b, "judge": judge}
        return Reward(outcome=Outcome.OK, value=0.5, seconds=seconds)

    # the reference runs beside the 8B answer: 1 + 4, 3 + 1 (its 32B takes 3) and 2 + 2 seconds
    rewards = [timed(1.0, 0.5, 4.0), timed(1.0, 3.0, 1.0), timed(2.0, 0.1, 2.0)]
    invalid = Reward(outcome=Outcome.INVALID_ACTION, value=0.0, reason="not_json", seconds={"parse": 0.004})
    flushed = means_of(([*rewards, invalid], [0, 0, 1, 1])).flush()
    assert [flushed[f"time/judge_{share}_s"] for share in ("p50", "p95", "max")] == [2.0, 4.0, 4.0]
    assert flushed["time/parse_max_s"] == 0.004
    assert [flushed[f"time/slowest_{stage}_s"] for stage in ("parse", "rag_8b", "rag_32b", "judge")] == [
        0.001, 1.0, 0.5, 4.0
    ]  # fmt: skip


def test_a_stage_that_no_completion_came_to_has_no_time():
    invalid = Reward(outcome=Outcome.INVALID_ACTION, value=0.0, reason="not_json", seconds={"parse": 0.004})
    flushed = means_of(([invalid], [0])).flush()
    assert math.isnan(flushed["time/judge_p50_s"])
    assert flushed["time/parse_p50_s"] == 0.004


def test_a_band_is_drawn_where_there_is_a_kl_and_nowhere_else():
    """TensorBoard draws a band over equal steps alone."""
    targets = {"fairness": KLTarget(beta=0.1, low=0.02, high=0.06), "hallucination": KLTarget(beta=0.1)}
    control, means = KLControl(targets, None), Means(kl_names(BRANCHES))
    # ten tokens each; the second branch's weigh 5 together, by the ratio to the policy that sampled them
    add_kl(means, [[0.3, 0.2, 1.0, 10.0, 10.0], [0.3, 0.2, 1.0, 10.0, 5.0]], [0.1, 0.1], control)
    flushed = means.flush()
    assert flushed["kl/fairness"] == 0.03
    assert (flushed["kl/hallucination"], flushed["kl/hallucination_k1"]) == (0.06, 0.04)
    assert (flushed["kl/hallucination_clamped"], flushed["kl/hallucination_tokens"]) == (0.1, 10)
    assert flushed["kl"] == pytest.approx(0.6 / 15)
    assert (flushed["kl/fairness_low"], flushed["kl/fairness_high"]) == (0.02, 0.06)
    assert math.isnan(flushed["kl/hallucination_low"])  # it has none
    add_kl(means, [[0.0] * 5, [0.3, 0.2, 0.0, 10.0, 10.0]], [0.1, 0.1], control)  # no row of fairness
    flushed = means.flush()
    assert all(math.isnan(flushed[f"kl/fairness{edge}"]) for edge in ("", "_low", "_high"))
