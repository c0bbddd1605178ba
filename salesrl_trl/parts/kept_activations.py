"""Selective activation checkpointing: only the layers whose activations do not fit are recomputed."""

from collections.abc import Mapping, Sequence

import torch
from accelerate.logging import get_logger
from torch.utils.hooks import RemovableHandle
from transformers.modeling_layers import GradientCheckpointingLayer

from salesrl_trl.config.rollouts import first
from salesrl_trl.telemetry.device import GIB
from salesrl_trl.wiring.part import Part, PartContext

logger = get_logger(__name__)


class KeptActivations(Part):
    """Exempts as many layers from gradient checkpointing as `kept_activations_gib` allows in each pass of a run, the
    last one always. These are the last layers, whose activations the backward pass frees before it recomputes others.
    Gradients are the same."""

    def connect(self, run: PartContext) -> None:
        args, decoder = run.args, run.trl.model().get_decoder()
        self._decoder: torch.nn.Module | None = None
        self._hooks: list[RemovableHandle] = []
        self._layers = [layer for layer in decoder.modules() if isinstance(layer, GradientCheckpointingLayer)]
        self._kept: list[GradientCheckpointingLayer] = []
        number = 2 if args.bf16 or args.fp16 else 4
        sizes = [size for layer in self._layers if (size := bytes_per_token(layer, number))]
        each = max(sizes, default=None) if len(sizes) == len(self._layers) else None  # a hybrid has other layers too
        reason = first({
            "`gradient_checkpointing` is false": not args.gradient_checkpointing,
            "DeepSpeed or FSDP may gather recomputed layers' weights, on all ranks together": args.is_sharded,
            "`torch_compile` would compile the model again for each number of layers": args.torch_compile,
            "eager attention keeps the scores of all pairs of tokens": decoder.config._attn_implementation == "eager",
            "the activations of this kind of model's layers can't be estimated": each is None,
        })  # fmt: skip
        if reason is not None or each is None:
            logger.info(f"off: `kept_activations_gib`, because {reason}")
            return
        self._layer_tokens = int(args.kept_activations_gib * GIB / each)
        self._decoder, run.passes.fitting = decoder, self._layer_tokens // len(self._layers)
        logger.info(f"passes of up to {run.passes.fitting:,} tokens recompute no layer (`kept_activations_gib`)")

    def on_train_begin(self, *_: object, **__: object) -> None:
        if self._decoder is not None:
            before = self._decoder.register_forward_pre_hook(self._before, with_kwargs=True)
            self._hooks += before, self._decoder.register_forward_hook(self._after, always_call=True)

    def end_run(self, *_: object, **__: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    on_train_end = end_run  # another trainer of the same model has its own setting

    def _before(self, decoder: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        inputs = (*args, kwargs.get("inputs_embeds"), kwargs.get("input_ids"))
        tokens = next((each.shape[:2].numel() for each in inputs if isinstance(each, torch.Tensor)), None)
        is_recomputed = decoder.training and all(layer.gradient_checkpointing for layer in self._layers)
        if tokens and torch.is_grad_enabled() and is_recomputed:
            self._kept = self._layers[-max(1, self._layer_tokens // tokens) :]
            for layer in self._kept:
                layer.gradient_checkpointing = False

    def _after(self, *_: object) -> None:
        while self._kept:
            self._kept.pop().gradient_checkpointing = True


def bytes_per_token(layer: torch.nn.Module, number: int) -> int | None:
    """What a layer keeps for its backward pass: inputs and outputs of its linear layers, `number` bytes each, and the
    float32 inputs of its norms. `None` if it has many other weights, as a mixture of experts, or a state-space model's
    convolution, beside which it keeps a state per token."""
    parts = [(name, each) for name, each in layer.named_modules() if "lora_" not in name]
    linear = [each for _, each in parts if isinstance(each, torch.nn.Linear)]
    weights = sum(each.numel() for _, part in parts for each in part.parameters(recurse=False))
    norms: int = weights - sum(each.numel() for part in linear for each in part.parameters(recurse=False))
    if any(isinstance(each, torch.nn.Conv1d) for _, each in parts) or norms > 0.1 * weights or not linear:
        return None
    return number * sum(each.in_features + each.out_features for each in linear) + 4 * norms
