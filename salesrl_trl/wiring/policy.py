"""The policy while TRL builds its trainer: loaded or passed in, inspected, and handed to vLLM."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
import trl.trainer.grpo_trainer as upstream_trainer
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from salesrl_trl.checkpoint.identity import Identity, identity_of_run, shape_of, weights_of
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.config.rollouts import SAMPLING_HINTS, engine_options
from salesrl_trl.config.trl_settings import clip_of, mode_of
from salesrl_trl.data.branches import Branches
from salesrl_trl.generation.vllm import SalesVLLMGeneration
from salesrl_trl.ground.process import patched
from salesrl_trl.update.weights import WeightCheck, raise_adapters


class Policy:
    """The policy of one trainer. `has_kl`: the loss has a KL term, so a reference is needed. `gets_adapter`: TRL will
    add an adapter to the model."""

    model: PreTrainedModel  # not set before TRL has loaded it
    weight_check: WeightCheck  # compares vLLM's weights with those being trained, once
    first_weights: str | None
    """Digest of the reference policy's, or an adapter's base, weights, which must match on resume."""
    shape: str  # number of weights and a digest of their names and shapes

    def __init__(self, args: SalesGRPOConfig, has_kl: bool, gets_adapter: bool) -> None:
        self._args = args
        self._has_kl = has_kl
        self._gets_adapter = gets_adapter

    @contextlib.contextmanager
    def building(self, model: PreTrainedModel | str) -> Iterator[None]:
        """While active, a TRL trainer under construction uses our engine options, reference policy and default mode of
        importance sampling, and loads models onto one device, not over all visible GPUs (`device_map="auto"`).
        `model`: the policy or its id. TRL loads a reference and computes its log-probs if `beta` is not 0."""
        args, load = self._args, upstream_trainer.create_model_from_path
        if not isinstance(model, str):
            self._look(model)

        def on_one_device(*positional: object, **kwargs: object) -> PreTrainedModel:
            loaded = load(*positional, **{"device_map": None, **kwargs})
            if not hasattr(self, "model"):  # the policy is loaded first, then its reference
                self._look(loaded)
            return loaded

        def engine(*positional: object, **kwargs: object) -> SalesVLLMGeneration:
            return SalesVLLMGeneration(*positional, engine_options=engine_options(args, self.model), **kwargs)

        mode, high = mode_of(args), clip_of(args)
        with (
            patched(upstream_trainer, "VLLMGeneration", engine),
            mock.patch.multiple(args, beta=float(self._has_kl), vllm_importance_sampling_mode=mode, epsilon_high=high),
            patched(upstream_trainer, "create_model_from_path", on_one_device),
        ):
            yield

    def _look(self, model: PreTrainedModel) -> None:
        args, self.model = self._args, model
        self.weight_check = WeightCheck(args.max_sampling_logp_difference, SAMPLING_HINTS)
        has_base = self._has_kl or self._gets_adapter or hasattr(model, "peft_config")
        self.first_weights = weights_of(model.named_parameters()) if has_base else None
        self.shape = shape_of(model.named_parameters())

    def raise_adapters(self, model: torch.nn.Module) -> None:
        raise_adapters(model, self._args.bf16 or self._args.fp16)

    def identity_of(self, rows: object, branches: Branches) -> Identity:
        """The identity of a run trained on these rows."""
        return identity_of_run(self._args, rows, branches, self.first_weights, self.shape)


class Reference:
    """Distinguishes the reference policy from the one being trained. `model` is the policy, including any adapter;
    `ref_model` is TRL's copy. With an adapter, the reference is the policy without its adapter instead of a copy."""

    def __init__(self, model: torch.nn.Module, ref_model: torch.nn.Module | None) -> None:
        self._ref_model = ref_model
        tuners = (module for module in model.modules() if isinstance(module, BaseTunerLayer))
        self._tuner = next(tuners, None)
        self.has_adapter = self._tuner is not None  # whether an adapter is trained
        for one_model in (model, ref_model):
            if one_model is not None:  # compiled models lack a truth value
                leave_out_no_pictures(one_model)

    def is_active(self, model: torch.nn.Module) -> bool:
        if self._tuner is None:
            return model is self._ref_model
        return bool(self._tuner.disable_adapters or "ref" in self._tuner.active_adapters)


def leave_out_no_pictures(model: torch.nn.Module) -> None:
    """Skip the model's vision tower for micro-batches without images. If other micro-batches of the rollout have some,
    TRL passes the tower an empty tensor, which fails."""

    def leave_out(
        _: object, args: tuple[object, ...], kwargs: dict[str, torch.Tensor | None]
    ) -> tuple[tuple[object, ...], dict[str, torch.Tensor | None]] | None:
        pixels = kwargs.get("pixel_values")
        if pixels is None or pixels.numel():
            return None
        return args, {name: value for name, value in kwargs.items() if name not in ("pixel_values", "image_grid_thw")}

    model.register_forward_pre_hook(leave_out, with_kwargs=True)
