"""Which model stands for the reference policy at the moment. The trainer and its parts (`wiring`) ask."""

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer


class Reference:
    """Tells the reference policy from the one in training.

    `model` is the policy, with its adapter if there is one. `ref_model` is TRL's copy. With an adapter there is no
    copy: the policy without its adapter is the reference.
    """

    def __init__(self, model: torch.nn.Module, ref_model: torch.nn.Module | None) -> None:
        self._ref_model = ref_model
        tuners = (module for module in model.modules() if isinstance(module, BaseTunerLayer))
        self._tuner: Any = next(tuners, None)  # peft publishes no types
        self.has_adapter = self._tuner is not None
        """Whether an adapter is trained."""

    def is_active(self, model: torch.nn.Module) -> bool:
        """Whether `model` stands for the reference policy now."""
        if self._tuner is None:
            return model is self._ref_model
        return bool(self._tuner.disable_adapters or "ref" in self._tuner.active_adapters)
