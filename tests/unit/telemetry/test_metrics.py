"""From per-completion outcomes to figures."""

import math

import pytest
import torch

from salesrl_trl.telemetry.metrics import Means, add_rewards, encode, metric_names
from salesrl_trl.types import Outcome, Reward

BRANCHES = ("fairness", "hallucination")


def ok(value, reference=None):
    return Reward(outcome=Outcome.OK, value=value, components={"candidate": value, "reference": reference})


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
    assert encode([], []).shape == (0, 4)


def test_two_ranks_gathered_give_what_one_rank_would():
    rewards, branch_ids = [ok(0.2), ok(0.4), INFRA, ok(0.9)], [0, 1, 0, 0]
    one = means_of((rewards, branch_ids)).flush()
    two = Means(metric_names(BRANCHES))
    gathered = torch.cat([encode(rewards[:2], branch_ids[:2]), encode(rewards[2:], branch_ids[2:])])
    add_rewards(two, gathered, BRANCHES)
    assert two.flush() == pytest.approx(one, nan_ok=True)
