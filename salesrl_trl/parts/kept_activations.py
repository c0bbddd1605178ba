"""Selective activation checkpointing: only the layers whose activations do not fit are recomputed."""

import logging
from collections.abc import Mapping, Sequence

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from salesrl_trl.config.rollouts import first
from salesrl_trl.wiring.part import Part, PartContext

logger = logging.getLogger(__name__)


class KeptActivations(Part):
    """Exempts layers from gradient checkpointing: all of them in a pass of at most `kept_activation_tokens`, and
    proportionally fewer in a longer one. These are the last layers, whose activations the backward pass frees before
    it recomputes others. Gradients are the same."""

    def connect(self, run: PartContext) -> None:
        args, decoder = run.args, run.trl.model().get_decoder()
        self._most, self._kept = args.kept_activation_tokens, list[GradientCheckpointingLayer]()
        self._layers = [layer for layer in decoder.modules() if isinstance(layer, GradientCheckpointingLayer)]
        reason = first({
            "recomputing a layer gathers its sharded weights, on all ranks together": args.is_sharded,
            "`torch_compile` would compile the model again for each number of layers": args.torch_compile,
            "the model's layers are not transformers' `GradientCheckpointingLayer`": not self._layers,
        })  # fmt: skip
        if reason is not None:
            logger.info(f"off: `kept_activation_tokens`, because {reason}")
            return
        decoder.register_forward_pre_hook(self._before, with_kwargs=True)
        decoder.register_forward_hook(self._after, always_call=True)

    def _before(self, decoder: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        inputs = (*args, kwargs.get("inputs_embeds"), kwargs.get("input_ids"))
        tokens = next((each.shape[:2].numel() for each in inputs if isinstance(each, torch.Tensor)), None)
        is_recomputed = decoder.training and all(layer.gradient_checkpointing for layer in self._layers)
        if tokens and torch.is_grad_enabled() and is_recomputed:
            self._kept = self._layers[max(0, -(len(self._layers) * (self._most - tokens) // tokens)) :]
            for layer in self._kept:
                layer.gradient_checkpointing = False

    def _after(self, *_: object) -> None:
        while self._kept:
            self._kept.pop().gradient_checkpointing = True
