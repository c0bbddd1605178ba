"""A reward of one's own from outside the package: two methods are enough, in a process of its own too."""

import asyncio

from seams.own_reward import Shortness
from trl.trainer.utils import get_callable_name

from salesrl_trl.reward.base import RewardNames
from salesrl_trl.types import Outcome


def test_a_reward_of_two_methods_is_all_that_a_desk_needs(result_of):
    result = result_of(Shortness(), ["four", "too long a text", "raises"])
    assert result.values == [0.25, None, None]
    assert [each.reason for each in result.rewards] == ["", "too_long", "raised_ValueError"]
    assert [each.outcome for each in result.rewards] == [Outcome.OK, Outcome.INFRA, Outcome.INFRA]
    assert [span.name for span in result.report.spans] == ["count"] * 3
    assert result.report.traffic == {}


def test_trl_calls_it_as_any_async_reward_function():
    reward = Shortness()
    completions = ["four", [{"role": "assistant", "content": "five5"}]]
    values = asyncio.run(reward(prompts=["p", "p"], completions=completions, row=[0, 0], trainer_state=None))
    assert values == [0.25, 0.2]
    assert get_callable_name(reward) == "Shortness"


def test_what_it_does_not_say_of_itself_has_a_default():
    reward = Shortness()
    assert reward.names == RewardNames()
    assert asyncio.run(reward.warm_up()) == {}
    assert reward.unusable({}) == []
