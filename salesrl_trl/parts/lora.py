"""LoRA layers in fewer kernels than PEFT's, which scales an adapter's output, adds it to the base's, and adds up the
gradients of a layer's input in kernels of their own. Each of these reads and writes whole activations."""

from collections import Counter
from typing import Any

import torch
from accelerate.logging import get_logger
from peft.tuners.lora.layer import Linear, LoraLayer
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook

from salesrl_trl.config.rollouts import first
from salesrl_trl.wiring.part import Part, PartContext

logger = get_logger(__name__)

_HOOKS = ("forward", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # others, e.g. quantised ones, may not support each operation


class LoraLayers(Part):
    """Spares LoRA's casts of inputs, and fuses its layers, each unless something prevents it."""

    def connect(self, run: PartContext) -> None:
        args, trl, model = run.args, run.trl, run.trl.model()
        spare_casts(model, args.device.type)
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
        cause = {"this is untested with DeepSpeed": trl.is_deepspeed, "`torch_compile` fuses them": args.torch_compile}
        reason = first(cause)
        found = Counter(reason or fuse(each, dtype) for each in model.modules() if isinstance(each, LoraLayer))
        for why, number in found.items():
            if why is not None:
                logger.info(f"off: fused kernels in {number} LoRA layers, because {why}")


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


def fuse(layer: LoraLayer, dtype: torch.dtype | None = None) -> str | None:
    """Turn a layer into a `FusedLinear`, which it stays; otherwise, why not. `dtype`: that of passes, if known."""
    base: Any = layer.get_base_layer()
    dtypes = {each.dtype for each in base.parameters()}
    reason = first({
        f"they are PEFT's `{type(layer).__name__}`, not its `Linear`": type(layer) not in (Linear, FusedLinear),
        "their base layers are not `torch.nn.Linear`": type(base) is not torch.nn.Linear,
        "their base layers are trained too": any(each.requires_grad for each in base.parameters()),
        f"adapters are computed in {dtype}, their base layers are not": dtype and dtypes != {dtype},
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
        is_usual = not (args or kwargs or self.disable_adapters or self.merged) and len(active) == 1
        if not is_usual or (operands := self._operands(x, active[0])) is None:
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        rows = _Product.apply(x.reshape(-1, x.shape[-1]), *operands)  # type: ignore[no-untyped-call]
        return rows.view(*x.shape[:-1], rows.shape[-1])  # type: ignore[no-any-return]

    def _operands(self, x: torch.Tensor, name: str) -> tuple[Any, ...] | None:
        """`_Product`'s other operands, or `None` to leave this pass to PEFT. Modules' attributes are slow to read."""
        base, down, up, dropout = self.base_layer, self.lora_A[name], self.lora_B[name], self.lora_dropout[name]
        if {type(base), type(down), type(up)} != {torch.nn.Linear} or _has_dropout(dropout):
            return None
        own_hooks = any(any(map(vars(each).get, _HOOKS)) for each in (base, down, up, dropout))
        has_hooks, where = own_hooks or _has_any_global_hook(), x.device.type  # type: ignore[no-untyped-call]
        if has_hooks or name in self.lora_variant or up.bias is not None or not torch.amp.is_autocast_available(where):
            return None
        weight, bias, narrow, wide, scaling = base.weight, base.bias, down.weight, up.weight, self.scaling[name]
        frozen = [weight] if bias is None else [weight, bias]
        is_plain = all(type(each) in _PLAIN for each in (x, narrow, wide, *frozen))
        if not is_plain or isinstance(scaling, torch.Tensor) or any(each.requires_grad for each in frozen):
            return None
        dtype = torch.get_autocast_dtype(where) if torch.is_autocast_enabled(where) else narrow.dtype
        return (weight, bias, narrow, wide, scaling) if all(each.dtype == dtype for each in (x, *frozen)) else None


class _Product(torch.autograd.Function):
    """`x W' + bias + scaling x A' B'`, whose last product is added to the others while it is computed.

    Shapes: x (rows, in), W (out, in), A (r, in), B (out, r). A and B are cast to the dtype of the others.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, down: torch.Tensor,
        up: torch.Tensor, scaling: float,
    ) -> torch.Tensor:  # fmt: skip
        ctx.dtype, ctx.scaling = up.dtype, scaling
        down, up = down.to(x.dtype), (up * scaling).to(x.dtype)
        output, narrow = functional.linear(x, weight, bias), functional.linear(x, down)
        output.addmm_(narrow, up.t())
        ctx.save_for_backward(x, weight, down, up, narrow)
        return output  # not a view, which PyTorch would not let a model change in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_autocast_enabled(where := gradients.device.type):  # would cast some of the operands, not all
            with torch.autocast(where, enabled=False):
                return _Product.backward(ctx, gradients)
        x, weight, down, up, narrow = ctx.saved_tensors  # once, as checkpointing and offloading require
        narrowed = gradients @ up
        of_x = (gradients @ weight).addmm_(narrowed, down) if ctx.needs_input_grad[0] else None
        of_up = (gradients.t() @ narrow).to(ctx.dtype) * ctx.scaling  # rounded once
        return of_x, None, None, narrowed.t() @ x, of_up, None


def _has_dropout(layer: torch.nn.Module) -> bool:
    return type(layer) is not torch.nn.Identity and bool(getattr(layer, "p", 1))  # `disable_dropout` sets p to 0
