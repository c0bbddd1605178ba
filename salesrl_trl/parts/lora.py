"""LoRA layers in fewer kernels than PEFT's, which scales an adapter's output, adds it to the base's, and adds up the
gradients of a layer's input in kernels of their own. Each of these reads and writes whole activations."""

from collections import Counter
from typing import Any

import torch
from accelerate.logging import get_logger
from peft.tuners.lora.layer import Linear, LoraLayer
from torch.autograd.function import once_differentiable
from torch.nn import functional

from salesrl_trl.config.rollouts import first
from salesrl_trl.wiring.part import Part, PartContext

logger = get_logger(__name__)

_HOOKS = ("forward", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class LoraLayers(Part):
    """Spares LoRA's casts of inputs, and fuses its layers, each unless something prevents it."""

    def connect(self, run: PartContext) -> None:
        args, model = run.args, run.trl.model()
        if run.trl.is_deepspeed:
            return
        spare_casts(model, args.device.type)
        reason = "`torch_compile` fuses their kernels" if args.torch_compile else None
        found = Counter(reason or fuse(each) for each in model.modules() if isinstance(each, LoraLayer))
        for why, number in found.items():
            if why is not None:
                logger.info(f"off: fewer kernels in {number} LoRA layers, because {why}")


class OutsideAutocast:
    """True while autocast is off."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def __bool__(self) -> bool:
        return not torch.is_autocast_enabled(self._device_type)


def spare_casts(model: torch.nn.Module, device_type: str) -> None:
    """Prevent LoRA's float32 layers from casting inputs to float32 that autocast casts back at once. Without dropout,
    loss and gradients are bitwise the same, since float32 represents every 16-bit number."""
    for module in model.modules():
        if isinstance(module, Linear) and not module.lora_variant:
            module.cast_input_dtype_enabled = OutsideAutocast(device_type)


def fuse(layer: LoraLayer) -> str | None:
    """Turn a layer into a `FusedLinear`, which it stays; otherwise, why not."""
    base: Any = layer.get_base_layer()
    reason = first({
        f"PEFT's {type(layer).__name__} is not its Linear": type(layer) not in (Linear, FusedLinear),
        "their base layers are not `torch.nn.Linear`": type(base) is not torch.nn.Linear,
        "their base layers are trained too": any(each.requires_grad for each in base.parameters()),
        "they have a variant such as DoRA, or a bias": bool(layer.lora_variant) or any(layer.lora_bias.values()),
        "`lora_dropout` is not 0": any(map(_has_dropout, layer.lora_dropout.values())),
    })  # fmt: skip
    if reason is None:
        layer.__class__ = FusedLinear
    return reason


class FusedLinear(Linear):
    """A LoRA layer over a frozen `torch.nn.Linear`. PEFT computes what this one doesn't: no adapter or several, merged
    weights, a variant, a bias or dropout, hooks of the layers inside, inputs of another dtype than the base's."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        active = [name for name in self.active_adapters if name in self.lora_A]
        if args or kwargs or self.disable_adapters or self.merged or len(active) != 1 or not self._fits(x, active[0]):
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        base, (name,) = self.base_layer, active
        down, up = self.lora_A[name].weight, self.lora_B[name].weight
        return _Product.apply(x, base.weight, base.bias, down, up, self.scaling[name])  # type: ignore[no-any-return, no-untyped-call]

    def _fits(self, x: torch.Tensor, name: str) -> bool:
        layers, kind = (self.base_layer, self.lora_A[name], self.lora_B[name]), x.device.type
        if any(type(each) is not torch.nn.Linear or any(map(vars(each).get, _HOOKS)) for each in layers):
            return False
        frozen = [each for each in (self.base_layer.weight, self.base_layer.bias) if each is not None]
        is_own = name in self.lora_variant or self.lora_bias[name]
        if (
            is_own
            or type(self.lora_dropout[name]) is not torch.nn.Identity
            or any(each.requires_grad for each in frozen)
        ):
            return False
        dtype = self.lora_A[name].weight.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        return all(each.dtype == dtype for each in (x, *frozen))


class _Product(torch.autograd.Function):
    """`x W' + bias + scaling x A' B'`, whose last product is added to the others while it is computed.

    Shapes: x (..., in), W (out, in), A (r, in), B (out, r). A and B are cast to the dtype of the others.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, down: torch.Tensor,
        up: torch.Tensor, scaling: float,
    ) -> torch.Tensor:  # fmt: skip
        down, up = down.to(x.dtype), up.to(x.dtype)
        output, narrow = functional.linear(x, weight, bias), functional.linear(x, down)
        _rows(output).addmm_(_rows(narrow), up.t(), alpha=scaling)
        ctx.save_for_backward(x, weight, down, up, narrow)
        ctx.scaling = scaling
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, wide: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, down, up, narrow = ctx.saved_tensors
        gradients = _rows(wide)
        narrowed = (gradients @ up).mul_(ctx.scaling)
        of_x = (gradients @ weight).addmm_(narrowed, down).view(x.shape) if ctx.needs_input_grad[0] else None
        of_up = (gradients.t() @ _rows(narrow)).mul_(ctx.scaling)
        return of_x, None, None, narrowed.t() @ _rows(x), of_up, None


def _has_dropout(layer: torch.nn.Module) -> bool:
    return bool(getattr(layer, "p", 0.0))  # PEFT has an identity for 0, and `disable_dropout` sets 0


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
