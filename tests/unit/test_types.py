"""The carriers."""

import pytest

from salesrl_trl.types import Message, Outcome, Reward, SalesRow


@pytest.mark.parametrize("outcome", [Outcome.INFRA, Outcome.JUDGE_INVALID])
def test_a_failed_call_can_not_be_given_a_number(outcome):
    with pytest.raises(ValueError, match="does not go with"):
        Reward(outcome=outcome, value=0.0)


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.INVALID_ACTION])
def test_a_scored_completion_can_not_be_without_a_number(outcome):
    with pytest.raises(ValueError, match="does not go with"):
        Reward(outcome=outcome, value=None)


def test_the_context_is_a_line_per_turn():
    row = SalesRow(
        row_id="1",
        branch="fairness",
        conversation=(Message(role="customer", content="你好"), Message(role="seller", content="Hi")),
    )
    assert row.context == "customer: 你好\nseller: Hi"
