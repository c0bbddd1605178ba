"""The reference policy, to which the KL is measured.

Owns its loading by TRL, and which model stands for it at the moment. Refuses to compute log-probs: TRL does.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import trl.trainer.grpo_trainer as upstream_trainer
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel
from trl import GRPOConfig

from salesrl_trl.ground.patched import replaced


class Loaded:
    """The policy: given as a model, or loaded by TRL from its id.

    `model`: the policy, or its id. `take`: called with the policy, before TRL puts an adapter on it.
    """

    def __init__(self, model: PreTrainedModel | str, take: Callable[[PreTrainedModel], None]) -> None:
        self._model: PreTrainedModel | None = None
        self._take = take
        if not isinstance(model, str):
            self.record(model)

    @property
    def is_there(self) -> bool:
        return self._model is not None

    @property
    def model(self) -> PreTrainedModel:
        """The policy, from the moment it is there."""
        assert self._model is not None
        return self._model

    def record(self, model: PreTrainedModel) -> None:
        """This is the policy."""
        self._model = model
        self._take(model)


@contextlib.contextmanager
def reference_wanted(args: GRPOConfig, wanted: bool, policy: Loaded) -> Iterator[None]:
    """While active, a `GRPOTrainer` under construction loads a reference model, and takes its log-probs, if wanted.

    TRL does so if `args.beta` is not 0. In a single process TRL would spread models over all visible GPUs
    (`device_map="auto"`). Here they go to one device. The first one that is loaded is the policy, if it is not there.
    """

    def on_one_device(*args: object, **kwargs: object) -> PreTrainedModel:
        model = load(*args, **{"device_map": None, **kwargs})
        if not policy.is_there:
            policy.record(model)
        return model

    load = upstream_trainer.create_model_from_path
    with (
        replaced(args, "beta", 1.0 if wanted else 0.0),
        replaced(upstream_trainer, "create_model_from_path", on_one_device),
    ):
        yield


class Reference:
    """Tells the reference policy from the one in training.

    `model`: the policy, with its adapter if there is one. `ref_model`: TRL's copy. `None` with an adapter: then the
    policy without its adapter is the reference.
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
