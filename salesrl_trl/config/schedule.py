"""The learning rate's schedule: what an adaptive one follows, and whether its arguments are there.

Owns these checks. transformers has the schedules, and would refuse a wrong argument after the model was loaded.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType
from trl import GRPOConfig

from salesrl_trl.config.checks import check, structure
from salesrl_trl.errors import ConfigError

ADAPTIVE = ("reduce_lr_on_plateau", "greedy")
"""Schedules that move the learning rate by a figure of evaluations."""


def settle_schedule(args: GRPOConfig) -> None:
    """Let an adaptive schedule follow the reward of evaluations, unless the settings name another figure.

    Raises:
        `ConfigError`: the schedule can't be built from its arguments, or there are no evaluations to follow.
    """
    try:
        name = SchedulerType(args.lr_scheduler_type).value
    except ValueError:
        names = ", ".join(each.value for each in SchedulerType)
        raise ConfigError(f"`lr_scheduler_type` is {args.lr_scheduler_type!r}. Expected one of: {names}.") from None
    kwargs: dict[str, object] = structure("lr_scheduler_kwargs", args.lr_scheduler_kwargs or {}, dict)
    if name in ADAPTIVE:
        check(
            getattr(args.eval_strategy, "value", args.eval_strategy) != "no",
            f"`lr_scheduler_type: {name}` moves the learning rate by a figure of evaluations, and `eval_strategy` is "
            "no. Expected evaluations during training. Set `eval_strategy: steps` and `eval_steps`.",
        )
        args.metric_for_best_model = f"eval_{(args.metric_for_best_model or 'reward').removeprefix('eval_')}"
        if args.greater_is_better is None:
            args.greater_is_better = not args.metric_for_best_model.endswith("loss")
        kwargs.setdefault("mode", "max" if args.greater_is_better else "min")
    args.lr_scheduler_kwargs = kwargs or None
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
    try:
        get_scheduler(name, optimizer, 0, 1, kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"`lr_scheduler_type: {name}` with `lr_scheduler_kwargs: {kwargs}` can't be built: {error}. Expected the "
            "arguments of transformers' schedule of this name. Correct `lr_scheduler_kwargs`."
        ) from error


class Schedule(Protocol):
    """An adaptive schedule."""

    def step(self, value: float) -> None: ...


def follow(figures: Mapping[str, float | None], args: GRPOConfig, schedule: Schedule | None) -> None:
    """Let an adaptive schedule see an evaluation. One in which nothing could be scored moves nothing.

    Args:
        figures (`Mapping[str, float | None]`):
            The evaluation's figures.
        args (`GRPOConfig`):
            Settings, after `settle_schedule`.
        schedule (`Schedule`, *optional*):
            The schedule. `None` for an evaluation that it should not see, before the first step.

    Raises:
        `ConfigError`: evaluations have no such figure.
    """
    if SchedulerType(args.lr_scheduler_type).value not in ADAPTIVE:
        return
    name = args.metric_for_best_model
    check(
        name in figures,
        f"`metric_for_best_model` is {name}, which evaluations do not have. Expected one of: "
        f"{', '.join(sorted(figures))}.",
    )
    value = figures[name]
    if schedule is not None and value is not None:
        schedule.step(value)
