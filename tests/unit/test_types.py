"""The carriers."""

import pytest

from salesrl_trl.types import Outcome, Reward, Verdict


def test_a_failed_call_can_not_be_given_a_number_and_a_scored_completion_not_be_without_one():
    unscored = {Outcome.INFRA: 0.0, Outcome.JUDGE_INVALID: 0.0, Outcome.OK: None, Outcome.INVALID_ACTION: None}
    for outcome, value in unscored.items():
        with pytest.raises(ValueError, match="is inconsistent with"):
            Reward(outcome=outcome, value=value)


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan"), -1e39, 2e18])
def test_no_reward_holds_what_has_no_finite_square_in_float32(number):
    for held in ({"value": number}, {"reference_value": number}, {"components": {"judge": number}}):
        with pytest.raises(ValueError, match="not a number of at most 1e\\+18"):
            Reward(**{"outcome": Outcome.OK, "value": 0.5, **held})


@pytest.mark.parametrize("score", [7.0, -0.1, float("nan"), "0.5", True, None])
def test_no_verdict_holds_a_score_outside_its_range(score):
    with pytest.raises(ValueError, match="not a number in"):
        Verdict(candidate=score, reference=None, reason="")
