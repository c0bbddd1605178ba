"""The hybrid baseline by hand, and beside TRL's own formula."""

import math

import pytest
import torch

from salesrl_trl.update.advantages import hybrid_advantages

NAN = math.nan


def advantages(rewards, references, weight, *, scale="group", generations=4):
    values, missing = hybrid_advantages(
        torch.tensor(rewards), torch.tensor(references), generations, weight, scale_rewards=scale
    )
    return values, missing.tolist()


def grpo(rewards, generations=4):
    """Plain GRPO, as TRL writes it: (r - mean) / (std + 1e-4) with Bessel's correction."""
    groups = torch.tensor(rewards).view(-1, generations)
    std = groups.std(dim=1, keepdim=True)
    return ((groups - groups.mean(dim=1, keepdim=True)) / (std + 1e-4)).flatten()


def test_unscaled_the_baseline_is_the_weighted_sum_of_mean_and_reference():
    # mean 0.5, reference 0.9, w = 1/4: baseline 0.75 x 0.5 + 0.25 x 0.9 = 0.6
    values, missing = advantages([0.2, 0.4, 0.6, 0.8], [0.9] * 4, 0.25, scale="none")
    assert values.tolist() == pytest.approx([-0.4, -0.2, 0.0, 0.2], abs=1e-6)
    assert missing == [False]


def test_scaled_by_the_spread_about_the_baseline():
    # mean 0.5, deviations -+0.3 and -+0.1: std = sqrt(0.2 / 3) = 0.258199, the batch's too.
    # shift = 0.5 x (0.5 - 0.9) = -0.2: spread^2 = 0.0666667 + 0.2 x (0.2 + 0.258199) = 0.1583065
    values, _ = advantages([0.2, 0.4, 0.6, 0.8], [0.9] * 4, 0.5)
    expected = [deviation / (math.sqrt(0.1583065) + 1e-4) for deviation in (-0.5, -0.3, -0.1, 0.1)]
    assert values.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_gap_as_small_as_a_judges_noise_moves_a_group_of_equal_rewards_little():
    # the first group lies 0.01 under its reference: shift = -0.0005. std of the batch: mean 0.65, 4 x 0.0225 and
    # 2 x (0.1225 + 0.0025), over 7: sqrt(0.34 / 7) = 0.22039. 0.0005 / sqrt(0.0005 x 0.22089) = 0.04758, less 1e-4
    values, _ = advantages([0.8] * 4 + [0.3, 0.7, 0.3, 0.7], [0.81] * 4 + [NAN] * 4, 0.05)
    assert values[:4].tolist() == pytest.approx([-0.0005 / (math.sqrt(0.0005 * 0.22089) + 1e-4)] * 4, rel=1e-3)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_without_a_reference_has_the_plain_baseline_and_is_told(scale):
    rewards = [0.1, 0.2, 0.3, 0.9, 0.1, 0.2, 0.3, 0.9]
    values, missing = advantages(rewards, [NAN] * 4 + [0.2, NAN, 0.4, NAN], 0.5, scale=scale)
    assert missing == [True, False]
    assert values[:4].sum().item() == pytest.approx(0.0, abs=1e-6)
    # the other group's reference is the mean of what was measured, 0.3, under its mean of 0.375
    assert values[4:].mean().item() > 0
    if scale == "group":
        assert torch.allclose(values[:4], grpo(rewards[:4]), atol=1e-6)


def test_no_shift_is_grpo():
    rewards = [0.1, 0.2, 0.4, 0.7, 0.5, 0.5, 0.6, 0.0]
    assert torch.allclose(advantages(rewards, [NAN] * 8, 0.5)[0], grpo(rewards), atol=1e-6)
    assert torch.allclose(advantages(rewards, [0.9] * 8, 0.0)[0], grpo(rewards), atol=1e-6)


def test_what_could_not_be_scored_has_no_advantage_and_is_out_of_every_mean():
    # scored: 0.2 and 0.6, mean 0.4; reference 0.5; w = 1: baseline 0.5
    values, missing = advantages([0.2, NAN, 0.6, NAN], [0.5, NAN, 0.5, NAN], 1.0, scale="none")
    assert values.tolist() == pytest.approx([-0.3, 0.0, 0.1, 0.0])
    assert missing == [False]
    # a group of which nothing was scored is no group that fell back
    values, missing = advantages([NAN] * 4 + [0.1, 0.2, 0.3, 0.4], [NAN] * 4 + [0.5] * 4, 0.5)
    assert values[:4].tolist() == [0.0] * 4
    assert missing == [False]


def test_scaled_over_the_batch():
    # means 0.5 and 0.5, std over all sqrt(2 x 0.2 / 7) = 0.239046; shifts -0.2 and 0:
    # spread^2 = 0.0571429 + 0.2 x (0.2 + 0.239046) = 0.1449521 in the first group, 0.0571429 in the second
    rewards = [0.2, 0.4, 0.6, 0.8] * 2
    values, _ = advantages(rewards, [0.9] * 4 + [0.5] * 4, 0.5, scale="batch")
    first = [deviation / (math.sqrt(0.1449521) + 1e-4) for deviation in (-0.5, -0.3, -0.1, 0.1)]
    second = [deviation / (math.sqrt(0.0571429) + 1e-4) for deviation in (-0.3, -0.1, 0.1, 0.3)]
    assert values.tolist() == pytest.approx(first + second, rel=1e-5)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_single_scored_completion_is_judged_by_the_reference_alone(scale):
    rewards = [0.2, NAN, NAN, NAN, 0.3, 0.7, 0.3, 0.7]
    values, missing = advantages(rewards, [0.6] * 4 + [0.5] * 4, 0.5, scale=scale)
    # shift = 0.5 x (0.2 - 0.6) = -0.2. std of the batch of 0.2, 0.3, 0.7, 0.3, 0.7: mean 0.44, squares 0.0576 +
    # 2 x 0.0196 + 2 x 0.0676 = 0.232, over 4: 0.240832. A group of one varies as little as one of equal rewards:
    # spread^2 = 0.2 x (0.2 + 0.240832) = 0.0881664, and 0.058 more over the batch
    spread = {"group": math.sqrt(0.0881664) + 1e-4, "batch": math.sqrt(0.1461664) + 1e-4, "none": 1.0}[scale]
    assert values.tolist()[:4] == pytest.approx([-0.2 / spread, 0, 0, 0], rel=1e-5)
    assert missing == [False, False]
    equal, _ = advantages([0.2, 0.2, NAN, NAN, *rewards[4:]], [0.6] * 4 + [0.5] * 4, 0.5, scale=scale)
    assert equal[0].sign() == equal[1].sign() == values[0].sign()
    without, missing = advantages(rewards, [NAN] * 4 + [0.5] * 4, 0.5, scale=scale)
    assert without[:4].tolist() == [0.0] * 4  # no baseline at all
    assert missing == [True, False]


def test_a_batch_of_a_single_scored_completion_gives_no_advantage_where_it_would_be_scaled():
    # nothing says what a difference of 0.01 is worth
    for scale, expected in (("group", 0.0), ("batch", 0.0), ("none", -0.005)):
        values, _ = advantages([0.5, NAN, NAN, NAN], [0.51] * 4, 0.5, scale=scale)
        assert values.tolist() == pytest.approx([expected, 0, 0, 0], abs=1e-7)
