"""Optimizer and learning rate of a run that goes on: from its checkpoint, as far as that fits this run's settings.

torch loads an optimizer's settings with its state, and a schedule with its last rate. `trainer` loads inside `fitted`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from accelerate.logging import get_logger
from torch.optim.lr_scheduler import LambdaLR

logger = get_logger(__name__)

OF_SETTINGS = ("initial_lr", "weight_decay", "betas", "eps", "momentum")
"""Entries of an optimizer's groups that the settings name. The others are its own."""


@contextlib.contextmanager
def fitted(optimizer: Any, schedule: Any, step: int) -> Iterator[None]:
    """While active, both load what fits, and log what does not: the state of another kind of optimizer begins anew,
    and a schedule of transformers goes on at the rate that this run's settings have after `step` optimizer steps."""
    load_optimizer, load_schedule, fresh = optimizer.load_state_dict, schedule.load_state_dict, optimizer.param_groups

    def optimizer_of(state: dict[str, Any]) -> None:
        groups = state["param_groups"]
        sizes = [[len(group["params"]) for group in every] for every in (groups, fresh)]
        others = {name for old in groups for name in old} - {"initial_lr", *(name for new in fresh for name in new)}
        if sizes[0] != sizes[1] or others:  # `initial_lr` is a schedule's
            logger.warning("the optimizer begins anew: the checkpoint's is of another kind, or of other weights")
            return
        kept = [{name: new[name] for name in OF_SETTINGS if name in new} for new in fresh]
        load_optimizer({**state, "param_groups": [old | new for old, new in zip(groups, kept, strict=True)]})

    def schedule_of(state: dict[str, Any]) -> None:
        own = schedule.state_dict()
        own.pop("load_state_dict", None)  # this function
        if state.keys() == own.keys() and len(state["_last_lr"]) == len(fresh):
            load_schedule(state)
        elif isinstance(schedule, LambdaLR):
            schedule.last_epoch = step
        if isinstance(schedule, LambdaLR):
            schedule.base_lrs = own["base_lrs"]
            parts = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
            schedule._last_lr = [rate * share(schedule.last_epoch) for rate, share in parts]
        for group, rate in zip(schedule.optimizer.param_groups, rates := schedule.get_last_lr(), strict=True):
            group["lr"] = rate
        if rates != state["_last_lr"]:
            logger.warning(
                f"the learning rate goes on at {rates[0]:.3g}, by this run's schedule. By the checkpoint's it was "
                f"{state['_last_lr'][0]:.3g}"
            )

    optimizer.load_state_dict, schedule.load_state_dict = optimizer_of, schedule_of
    try:
        yield
    finally:  # not `patched`: a schedule saves all that it has
        del optimizer.load_state_dict, schedule.load_state_dict
