"""DAPO's punishment of long completions, of one completion at a time."""

import asyncio
import pickle

import pytest
from trl.rewards import get_soft_overlong_punishment

from salesrl_trl import soft_overlong_punishment
from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.checks.reward import read_reward
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.reward.scorer import Per

PATH = "salesrl_trl.soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)"
ANSWERS = [[1] * length for length in (0, 6, 7, 8, 10, 11)]


def of(function):
    return asyncio.run(
        function(prompts=["p"] * len(ANSWERS), completions=["c"] * len(ANSWERS), completion_ids=ANSWERS)
    )


def test_it_is_trls_by_hand_in_code_in_a_recipe_and_in_a_process_of_the_rewards():
    in_a_recipe = read_reward(RewardConfig(reward_funcs=[PATH]), ["all"]).functions[PATH]
    by_hand = [0, 0, -0.25, -0.5, -1, -1]  # free up to 10 - 4 tokens, then a quarter for each
    assert get_soft_overlong_punishment(10, 4)(ANSWERS) == by_hand
    for function in (soft_overlong_punishment(10, 4), in_a_recipe, pickle.loads(pickle.dumps(in_a_recipe))):
        assert of(function) == by_hand
    assert in_a_recipe.names.together is Per.COMPLETION  # it waits for no other completion
    assert in_a_recipe.__name__ == "soft_overlong"


@pytest.mark.parametrize(("most", "cache"), [(4, 10), (10, 0), (10, -1)])
def test_arguments_the_wrong_way_round_are_refused(most, cache):
    with pytest.raises(ConfigError, match="`soft_punish_cache` is"):
        soft_overlong_punishment(most, cache)
