"""The soft overlong punishment of DAPO: TRL's, for each completion as soon as it is finished."""

from collections.abc import Callable
from functools import partial

from salesrl_trl.errors import ConfigError
from salesrl_trl.reward.functions import RewardFunction
from salesrl_trl.reward.scorer import Per


def soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> RewardFunction:
    """A reward function of a completion's length, which DAPO adds to the task's reward.

    It is 0 up to `max_completion_len - soft_punish_cache` tokens, and falls from there to -1 at `max_completion_len`
    (https://huggingface.co/papers/2503.14476, equation 13). verl's `penalty_factor` is its entry of `reward_weights`.
    """
    from trl.rewards import get_soft_overlong_punishment  # trl takes seconds, which not every reader has

    if not 0 < soft_punish_cache <= max_completion_len:
        raise ConfigError(f"`soft_punish_cache` is {soft_punish_cache}. Expected 1 to {max_completion_len} tokens.")
    of_batch = get_soft_overlong_punishment(max_completion_len, soft_punish_cache)
    return RewardFunction(partial(soft_overlong, of_batch), Per.COMPLETION)


def soft_overlong(of_batch: Callable[[list[list[int]]], list[float]], completion_ids: list[int]) -> float:
    return of_batch([completion_ids])[0]
