"""The reference policy, to which the KL is measured.

Owns its loading by TRL, and which model stands for it at the moment. Refuses to compute log-probs: TRL does.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import trl.trainer.grpo_trainer as upstream_trainer
from peft.tuners.tuners_utils import BaseTunerLayer
from trl import GRPOConfig

from salesrl_trl.replaced import replaced


@contextlib.contextmanager
def reference_wanted(args: GRPOConfig, wanted: bool) -> Iterator[None]:
    """While active, a `GRPOTrainer` under construction loads a reference model, and takes its log-probs, if wanted.

    TRL does so if `args.beta` is not 0. In a single process TRL would spread the model over all visible GPUs
    (`device_map="auto"`). Here the model goes to the device of the policy.
    """
    on_one_device = functools.partial(upstream_trainer.create_model_from_path, device_map=None)
    with (
        replaced(args, "beta", 1.0 if wanted else 0.0),
        replaced(upstream_trainer, "create_model_from_path", on_one_device),
    ):
        yield


class Reference:
    """Tells the reference policy from the one in training.

    Args:
        model (`torch.nn.Module`):
            The policy, with its adapter if there is one.
        ref_model (`torch.nn.Module`, *optional*):
            TRL's copy. `None` with an adapter: then the policy without its adapter is the reference.
    """

    def __init__(self, model: torch.nn.Module, ref_model: torch.nn.Module | None) -> None:
        self._ref_model = ref_model
        tuners = (module for module in model.modules() if isinstance(module, BaseTunerLayer))
        self._tuner: Any = next(tuners, None)  # peft publishes no types

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained."""
        return self._tuner is not None

    def is_active(self, model: torch.nn.Module) -> bool:
        """Whether `model` stands for the reference policy now."""
        if self._tuner is None:
            return model is self._ref_model
        return bool(self._tuner.disable_adapters or "ref" in self._tuner.active_adapters)
