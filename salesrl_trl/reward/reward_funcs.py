"""Converts a trainer's `reward_funcs` into one reward on its event loop, and into the list for TRL."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from salesrl_trl.errors import ConfigError
from salesrl_trl.reward.functions import Function, reward_of
from salesrl_trl.reward.mixed import Apart, combined
from salesrl_trl.reward.reward_loop import RewardColumn, RewardLoop
from salesrl_trl.reward.scorer import Scorer

RewardFunc: TypeAlias = str | torch.nn.Module | Function | Scorer | RewardLoop
"""As in TRL, a function, a reward model or its id; or a reward from this package."""


@dataclass(frozen=True, slots=True)
class RewardFuncs:
    """A trainer's rewards."""

    reward_loop: RewardLoop
    functions: list[object]  # for TRL, in the order of `reward_funcs`: the loop's columns, and reward models
    weights: list[float]
    has_models: bool  # or environments with rewards

    @classmethod
    def of(
        cls, reward_funcs: RewardFunc | Sequence[RewardFunc] | None, weights: Sequence[float] | None,
        apart: Apart | None, *, has_more: bool = False, records: bool = False,
    ) -> "RewardFuncs":  # fmt: skip
        """Validate `reward_funcs` and `reward_weights` and build the rewards. `apart` moves them to a separate process
        (`reward_process`). `has_more`: whether an environment adds a reward. `records`: as in `Scorer`."""
        given: list[object] = [] if reward_funcs is None else [reward_funcs]
        if isinstance(reward_funcs, list | tuple):
            given = [*reward_funcs]
        for scorer in (reward for reward in given if records and isinstance(reward, Scorer)):
            scorer.records = True
        alone = given[0] if len(given) == 1 else None
        if isinstance(alone, Scorer) and not has_more:
            alone = RewardLoop(combined([alone], [1.0], apart))
        count = len(alone.reward.names.functions) if isinstance(alone, RewardLoop) else len(given)
        check_weights(weights, count)
        weights = [1.0] * count if weights is None else list(weights)
        if isinstance(alone, RewardLoop):
            return cls(alone, list(alone.functions), weights, has_models=has_more)
        models = [isinstance(function, str | torch.nn.Module) for function in given]
        called = [place for place, is_model in enumerate(models) if not is_model]
        rewards, of_called = [reward_of(given[place]) for place in called], [weights[place] for place in called]
        reward_loop = RewardLoop(combined(rewards, of_called, apart, are_all=not (has_more or any(models))))
        functions = dict(enumerate(given)) | dict(zip(called, reward_loop.functions, strict=True))
        return cls(reward_loop, [*functions.values()], weights, has_more or any(models))

    @property
    def recorded_weights(self) -> dict[str, float]:
        """The weight of each function that this package calls, by its name in the recording."""
        weighed = zip(self.functions, self.weights, strict=True)
        return {function.name: weight for function, weight in weighed if isinstance(function, RewardColumn)}

    def check(self, columns: Sequence[str] | None, group: int, size: int) -> None:
        """Raise `ConfigError` if a required column is absent (unless columns are unknown), or if completions scored
        jointly are split across processes. A process generates `size` at a time, `group` per prompt."""
        names = self.reward_loop.reward.names
        if columns is not None:
            for needs in names.needs:
                needs.check(columns)
        if size % names.together.size(group, size):
            raise ConfigError(
                f"a reward function scores the {group} completions of a prompt jointly, but a process generates "
                f"{size} at a time, which splits prompts across processes. Expected a multiple of {group}. Change "
                "`per_device_train_batch_size`, `gradient_accumulation_steps` or `steps_per_generation`."
            )

    def why_at_once(self, group: int, size: int, tools: str | None) -> str | None:
        """The reason why a batch's rewards arrive all at once, if they do. `tools`: as in `Hooks`."""
        if tools is not None:
            return f"TRL regenerates completions with {tools} when it iterates over a batch again"
        if self.has_models:
            return "a reward model or an environment scores a whole batch"
        if size > group and self.reward_loop.reward.names.together.size(group, size) == size:
            return "a reward function scores a whole batch; `@per_completion` and `@per_group` would not wait for it"
        return None


def check_weights(weights: Sequence[float] | None, count: int) -> None:
    """Raise `ConfigError` unless there is a weight for each of `count` functions, or none at all."""
    if weights is not None and len(weights) != count:
        raise ConfigError(f"`reward_weights` has {len(weights)} values for {count} functions. Set one for each.")


def needs_loop(function: object) -> bool:
    """Whether TRL's own `GRPOTrainer` can't call it."""
    return isinstance(function, RewardLoop) or (isinstance(function, Scorer) and function.is_played)
