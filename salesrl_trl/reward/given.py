"""From the `reward_funcs` of a trainer to one reward at a desk, and to the list that TRL gets.

Owns who calls what: TRL runs reward models, as it does; the desk calls all functions. Owns no call itself.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from salesrl_trl.errors import ConfigError
from salesrl_trl.reward.base import TRL_ARGUMENTS, BatchedReward
from salesrl_trl.reward.desk import RewardDesk
from salesrl_trl.reward.functions import reward_of
from salesrl_trl.reward.mixed import combined
from salesrl_trl.telemetry.logs import show_lines

logger = logging.getLogger(__name__)

RewardFunc: TypeAlias = str | torch.nn.Module | Callable[..., Any] | BatchedReward | RewardDesk
"""As TRL has it: a function, a reward model, or its id; or a reward of this package."""


@dataclass(frozen=True, slots=True)
class GivenRewards:
    """The rewards of a trainer."""

    desk: RewardDesk
    """Scores completions by all functions."""
    functions: list[Any]
    """For TRL, in the order in which they were given: functions that the desk answers, and reward models."""
    weights: list[float]
    """TRL's weight of each."""
    has_models: bool
    """Whether a reward model is among them."""

    @classmethod
    def of(
        cls,
        given: RewardFunc | Sequence[RewardFunc] | None,
        weights: Sequence[float] | None,
        in_a_process: bool | None,
        *,
        has_more: bool = False,
    ) -> "GivenRewards":
        """The rewards that a user gave.

        Args:
            given (`RewardFunc` or `list[RewardFunc]`, *optional*):
                As TRL takes them. None at all where an environment has the rewards.
            weights (`Sequence[float]`, *optional*):
                TRL's `reward_weights`.
            in_a_process (`bool`, *optional*):
                The setting `reward_process`. A process of their own for functions, if it is true.
            has_more (`bool`, *optional*, defaults to `False`):
                Whether an environment has a reward beside them.

        Raises:
            `ConfigError`: something is no reward function, or there are not as many weights as functions.
        """
        every = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
        alone = every[0] if len(every) == 1 else None
        if isinstance(alone, BatchedReward) and not has_more:
            alone = RewardDesk(combined([alone], [1.0], in_a_process))
        count = len(alone.reward.function_names) if isinstance(alone, RewardDesk) else len(every)
        if weights is not None and len(weights) != count:
            raise ConfigError(
                f"`reward_weights` has {len(weights)} numbers for {count} reward functions. Expected one each."
            )
        weights = [1.0] * count if weights is None else list(weights)
        if isinstance(alone, RewardDesk):
            return cls(alone, list(alone.functions), weights, has_models=False)
        is_model = [isinstance(each, str | torch.nn.Module) for each in every]
        given_to_desk = zip(every, weights, is_model, strict=True)
        called = [(reward_of(each), weight) for each, weight, runs_in_trl in given_to_desk if not runs_in_trl]
        rewards, weighed = [reward for reward, _ in called], [weight for _, weight in called]
        are_all = not (has_more or any(is_model))
        desk = RewardDesk(combined(rewards, weighed, in_a_process, are_all=are_all))
        answered = iter(desk.functions)
        functions = [
            each if runs_in_trl else next(answered) for each, runs_in_trl in zip(every, is_model, strict=True)
        ]
        return cls(desk, functions, weights, any(is_model))

    def check(self, columns: Sequence[str] | None, group: int, size: int) -> None:
        """Check what functions need of the rows and of the sizes.

        Args:
            columns (`Sequence[str]`, *optional*):
                Columns of the dataset, if they are known.
            group (`int`):
                Completions of a prompt.
            size (`int`):
                Completions of a process's generation batch.

        Raises:
            `ConfigError`: a column is not there, or completions that are scored together lie on several processes.
        """
        if columns is not None:
            self.desk.reward.check_columns([*columns, *TRL_ARGUMENTS])
        if size % self.desk.reward.unit(group, size):
            raise ConfigError(
                f"a reward function scores the {group} completions of a prompt together, and a process generates "
                f"{size} at a time, so that some prompts lie on two processes. Expected a multiple of {group}. Change "
                "`per_device_train_batch_size`, `gradient_accumulation_steps` or `steps_per_generation`."
            )

    def why_at_once(self, group: int, size: int, tools: str | None) -> str | None:
        """The reason why the rewards of a batch come all at once, if they do. `tools`: as in `Hooks`."""
        if tools is not None:
            return f"TRL generates completions with {tools} anew when it goes over a batch again"
        if self.has_models:
            return "a reward model scores a whole batch"
        if size > group and self.desk.reward.unit(group, size) == size:
            return "a reward function scores a whole batch; `@per_completion` and `@per_group` need not wait for it"
        return None


def check_stock(reward_funcs: object, *further: object) -> None:
    """Say once that a plain `GRPOConfig` leaves TRL's trainer as it is.

    Args:
        reward_funcs (`object`):
            As given.
        further (`object`):
            Arguments that TRL's trainer does not have.

    Raises:
        `ConfigError`: one of them is given.
    """
    if isinstance(reward_funcs, RewardDesk) or any(each is not None for each in further):
        raise ConfigError(
            "`instruments`, `quick_eval`, `kl_law`, `sampler` and a reward at its desk go with a `SalesGRPOConfig`, "
            "and `args` is a plain `GRPOConfig` or none. Expected a `SalesGRPOConfig`."
        )
    show_lines()
    logger.info("a plain GRPOConfig: this trainer is TRL's own. A SalesGRPOConfig turns on what the package adds")
