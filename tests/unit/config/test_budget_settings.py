"""Limits that limit nothing are refused, with a message that says what is missing."""

import pytest

from salesrl_trl.build.assembly import budget_of
from salesrl_trl.config import RewardConfig
from salesrl_trl.errors import ConfigError
from salesrl_trl.reward.service.budget import CALLS, USD, Limit

PLACE = {"name": "a", "base_url": "http://a/v1", "model": "m"}
PRICED = {**PLACE, "usd_per_million_prompt_tokens": 1.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_calls": 0}, "`max_calls` is 0. Expected a number, at least 1"),
        ({"max_usd": -1.0}, "`max_usd` is -1.0. Expected a number, more than 0"),
        ({"max_usd": 1.0}, "no judge has a price. Expected `usd_per_million_prompt_tokens`"),
        ({"max_usd": 1.0, "judge_providers": [PLACE]}, "no judge has a price"),
        ({"judge_providers": [{**PLACE, "max_usd": 1.0}]}, "the provider has no price"),
        ({"judge_providers": [{**PRICED, "tokens_per_minute": 0}]}, r"\[a\].tokens_per_minute` is 0"),
        ({"judge_providers": [{**PRICED, "max_calls": -3}]}, r"\[a\].max_calls` is -3"),
        ({"judge_providers": [{**PLACE, "usd_per_million_prompt_tokens": -1.0}]}, "Expected a number, 0 or more"),
        ({"judge_providers": [{**PRICED, "max_usd": "1e2"}]}, r"\[a\].max_usd` is '1e2'. Expected a number"),
        ({"judge_providers": [{**PRICED, "max_usd": float("nan")}]}, r"\[a\].max_usd` is nan"),
        ({"max_usd": float("inf"), "judge_providers": [PRICED]}, "`max_usd` is inf"),
        ({"max_calls": 9, "reward_funcs": ["my.function"]}, "Expected `sales` among them"),
    ],
)
def test_a_limit_that_limits_nothing_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        RewardConfig(**settings)


def test_limits_have_the_names_of_their_settings(tmp_path):
    own = {**PRICED, "max_calls": 5, "max_usd": 0.5}
    config = RewardConfig(max_calls=9, max_usd=2.0, judge_providers=[own, {**PLACE, "name": "b"}])
    assert budget_of(config, tmp_path).limits == (
        Limit(name="max_calls", kind=CALLS, most=9),
        Limit(name="max_usd", kind=USD, most=2.0),
        Limit(name="judge_providers[a].max_calls", kind=CALLS, most=5, service="judge_a"),
        Limit(name="judge_providers[a].max_usd", kind=USD, most=0.5, service="judge_a"),
    )
    assert budget_of(RewardConfig(), tmp_path) is None
    for judge in ({**PLACE, "tokens_per_minute": 9}, PRICED):
        assert budget_of(RewardConfig(judge_providers=[judge]), tmp_path).limits == ()
