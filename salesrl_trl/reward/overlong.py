"""The soft overlong punishment of DAPO: TRL's, for each completion as soon as it is finished."""

from collections.abc import Callable
from functools import partial

from salesrl_trl.errors import ConfigError
from salesrl_trl.reward.functions import RewardFunction
from salesrl_trl.reward.scorer import Per


def soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> RewardFunction:
    """A reward function of a completion's length: 0 up to `max_completion_len - soft_punish_cache` tokens, from there
    linear to -1 at `max_completion_len` (https://huggingface.co/papers/2503.14476, eq. 13). Its entry of
    `reward_weights` is verl's `penalty_factor`.

    Args:
        max_completion_len (`int`):
            The longest completion, in tokens: `max_completion_length`.
        soft_punish_cache (`int`):
            The last tokens before it, over which the punishment grows; verl's `overlong_buffer.len`.
    """
    from trl.rewards import get_soft_overlong_punishment  # trl takes seconds, which not every reader has

    if not 0 < soft_punish_cache <= max_completion_len:
        raise ConfigError(
            f"`soft_punish_cache` is {soft_punish_cache} with `max_completion_len: {max_completion_len}`. Expected 1 "
            "token or more, and no more than the longest completion has."
        )
    return RewardFunction(
        partial(soft_overlong, get_soft_overlong_punishment(max_completion_len, soft_punish_cache)), Per.COMPLETION
    )


def soft_overlong(of_batch: Callable[[list[list[int]]], list[float]], completion_ids: list[int]) -> float:
    return of_batch([completion_ids])[0]
