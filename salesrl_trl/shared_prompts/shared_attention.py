"""Attention over a row with shared prefixes, through transformers' attention interface. Installed by `shared_passes`.

On GPUs in 16 bits it uses PyTorch's flash attention kernels. Each prefix and each segment attends to itself, causally;
all segments of a group together attend to their prefix, without a mask. The two softmaxes over parts of the keys are
combined by weighting each with its share of the normaliser. In the backward pass, each part contributes its share of
the gradient from the combined normaliser and output (Dao et al. 2022, appendix B.2).

Elsewhere it uses PyTorch's attention on two padded batches: the prefixes, and the segments with copies of their
prefix's keys.

Also defines which models and settings cannot share prompts, and why. The comparison in `shared_passes` detects any
others.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from salesrl_trl.shared_prompts.row_layout import Bounds, Layout

Attention = Callable[..., tuple[torch.Tensor, object]]  # in transformers' form

HALVES = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256  # most channels per head supported by the kernels
AMPERE = (8, 0)  # compute capability of the oldest supported GPUs


def can_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernels support these: 16 bits, on Ampere or newer GPUs, equal head widths divisible by 8."""
    width = query.size(-1)
    return (
        query.is_cuda
        and query.dtype in HALVES
        and width == key.size(-1) == value.size(-1)
        and width <= LARGEST_HEAD
        and width % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= AMPERE
    )


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, scale: float
) -> tuple[torch.Tensor, ...]:
    """PyTorch's kernel: output of shape (tokens, heads, channels), log of the normaliser of shape (heads, tokens) in
    float32, and its random state."""
    *ends, is_causal = bounds
    return torch.ops.aten._flash_attention_forward(  # type: ignore[no-any-return]
        q, k, v, *ends, 0.0, is_causal, False, scale=scale
    )[:4]


def backward(
    tensors: Sequence[torch.Tensor], bounds: Bounds, state: Sequence[torch.Tensor], scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value. `tensors`: the output's gradient, those three, output and normaliser."""
    *ends, is_causal = bounds
    return torch.ops.aten._flash_attention_backward(  # type: ignore[no-any-return]
        *tensors, *ends, 0.0, is_causal, *state, scale=scale
    )


class SharedFlash(torch.autograd.Function):
    """Attention over a row: `apply(query, key, value, layout, scale)`. Queries and output have shape (S, heads,
    channels); keys and values (S, heads of keys, channels)."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, scale: float
    ) -> torch.Tensor:
        out, normaliser, *state = forward(query, key, value, layout.parts, scale)
        crossing_state: list[torch.Tensor] = []
        if layout.prefixes:
            head, tail = layout.prefix_tokens, layout.prefix_tokens + layout.crossing_tokens
            far, far_normaliser, *crossing_state = forward(
                query[head:tail], key[:head], value[:head], layout.crossings, scale
            )
            near, near_normaliser = out[head:tail], normaliser[:, head:tail]
            joined = torch.logaddexp(near_normaliser, far_normaliser)  # (heads, tokens)
            share = torch.exp(far_normaliser - joined).T.unsqueeze(-1)  # (tokens, heads, 1)
            near.copy_(torch.lerp(near.float(), far.float(), share))
            near_normaliser.copy_(joined)
        ctx.save_for_backward(query, key, value, out, normaliser, *state, *crossing_state)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, normaliser, *states = ctx.saved_tensors
        layout, scale, grad = ctx.layout, ctx.scale, grad.contiguous()
        own = backward((grad, query, key, value, out, normaliser), layout.parts, states[:2], scale)
        if layout.prefixes:
            head, tail = layout.prefix_tokens, layout.prefix_tokens + layout.crossing_tokens
            joined = normaliser[:, head:tail].contiguous()
            tensors = (grad[head:tail], query[head:tail], key[:head], value[:head], out[head:tail], joined)
            crossing = backward(tensors, layout.crossings, states[2:], scale)
            for total, part, rows in zip(own, crossing, (slice(head, tail), slice(head), slice(head)), strict=True):
                total[rows] += part
        return *own, None, None


LAYOUT = "shared_prompts_layout"
"""Keyword argument that a model passes through to its attention."""
SDPA = "sdpa"
"""Name of PyTorch's attention, which supports masks, unlike flash attention."""
OWN_TERMS = ("softcap", "s_aux", "position_bias")
"""Arguments for attention terms unsupported by the kernels."""


class LayoutLostError(RuntimeError):
    """The model does not pass its keyword arguments to its attention, which needs the layout."""


def install(name: str) -> None:
    """Make transformers' attention of this name accept a layout; without one it is unchanged."""
    inner = ALL_ATTENTION_FUNCTIONS[name]
    if hasattr(inner, LAYOUT):
        return
    with_mask = getattr(ALL_ATTENTION_FUNCTIONS[SDPA], LAYOUT, ALL_ATTENTION_FUNCTIONS[SDPA])

    @functools.wraps(inner)
    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, object]:
        layout: Layout | None = kwargs.pop(LAYOUT, None)
        if layout is not None:
            return shared_attention(with_mask, module, query, key, value, layout, **kwargs), None
        if attention_mask is not None and attention_mask.shape == (1, 1, 1, 1) and key.size(2) > 1:
            raise LayoutLostError("the model does not pass its keyword arguments to its attention")
        return inner(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]

    vars(attention)[LAYOUT] = inner
    ALL_ATTENTION_FUNCTIONS[name] = attention


def shared_attention(
    inner: Attention,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention over one row, of shape (1, S, heads, channels of a value). `inner`: an attention in transformers' form
    that supports masks. `query`: (1, heads, S, channels); `key` and `value`: (1, heads of keys, S, channels)."""
    if torch.is_autocast_enabled(query.device.type):
        kind = torch.get_autocast_dtype(query.device.type)
        query, key, value = (tensor.to(kind) for tensor in (query, key, value))
    plain = not dropout and all(kwargs.get(name) is None for name in OWN_TERMS)
    if plain and can_flash(query, key, value):
        scale = query.size(-1) ** -0.5 if scaling is None else scaling
        rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return SharedFlash.apply(*rows, layout, scale)[None]  # type: ignore[no-any-return, no-untyped-call]
    # Two batches padded on the right: the prefixes, shape (groups with a prefix, heads, longest prefix, channels); and
    # the segments, with keys and values of their prefix and themselves.
    padded, given, parts = layout.padded, {"dropout": dropout, "scaling": scaling, **kwargs}, []
    if layout.prefixes:
        batch = [_gathered(tensor, padded.prefixes) for tensor in (query, key, value)]
        prefixes = inner(module, *batch, None, **{**given, "is_causal": True})[0]
        parts.append(prefixes.flatten(0, 1)[padded.prefix_places])
    queries = _gathered(query, padded.segments)
    keys, values = (_gathered(tensor, padded.keys) for tensor in (key, value))
    outputs = inner(module, queries, keys, values, padded.mask, **given)[0]
    return torch.cat([*parts, outputs.flatten(0, 1)[padded.segment_places]])[None]


def _gathered(row: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    taken = row[0].index_select(1, places.flatten())  # (heads, B * T, channels)
    return taken.view(len(taken), *places.shape, -1).transpose(0, 1)


FLASH = "flash"  # part of the names of attentions equivalent to `SharedFlash`
CHANGING_ROPE = ("dynamic", "longrope")
"""Rotary embedding types whose frequencies depend on a batch's longest sequence."""
KINDS = {"full_attention", "sliding_attention"}
"""Layer types that can share prompts; sliding ones as long as no sequence exceeds their window."""


def why_not_shared(model: nn.Module) -> str | None:
    """The first reason why this model, possibly wrapped by DDP or DeepSpeed, cannot share prompts, else `None`."""
    base, adapter, name = _base(model), getattr(model, "active_peft_config", None), attention_of(model)
    config = base.config
    other_kinds = {*(getattr(config, "layer_types", None) or ())} - KINDS
    reads_all = getattr(adapter, "alora_invocation_tokens", None) or getattr(adapter, "peft_type", None) == "LILY"
    has_interface, is_known = getattr(base, "_supports_attention_backend", False), name == SDPA or FLASH in name
    unknown = f"the model's attention is `{name}`. Expected `{SDPA}` or flash attention: set `attn_implementation`"
    reasons = {
        "the model's adapter adds tokens to the prompt": getattr(adapter, "is_prompt_learning", False),
        "the model's adapter depends on the tokens of a whole sequence": reads_all,
        "the model is compiled": hasattr(model, "_orig_mod"),
        "the model is split across devices": len({parameter.device for parameter in model.parameters()}) > 1,
        "the model accepts more than text": config.get_text_config() is not config,
        f"the model has layers of type {', '.join(sorted(other_kinds))}": other_kinds,
        "the model has recurrent layers": getattr(base, "_is_stateful", False),
        "the model's attention is chunked": getattr(config, "attention_chunk_size", None),
        "the model's attention does not use transformers' interface": not has_interface,
        unknown: not is_known,
        "the model's attention scores are capped": name != SDPA and getattr(config, "attn_logit_softcapping", None),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def attention_of(model: nn.Module) -> str:
    return str(_base(model).config._attn_implementation)


def window_of(model: nn.Module) -> int | None:
    config = _base(model).config
    kinds = getattr(config, "layer_types", None)
    has_window = getattr(config, "use_sliding_window", True) and (kinds is None or "sliding_attention" in kinds)
    return getattr(config, "sliding_window", None) if has_window else None


def rope_limit_of(model: nn.Module) -> int | None:
    """Columns from which the rotary embedding depends on a batch's longest sequence; `None` if never."""
    config = _base(model).config
    rope = getattr(config, "rope_parameters", None) or {}
    of_layers = [rope] if "rope_type" in rope else [entry for entry in rope.values() if isinstance(entry, dict)]
    changing = [layer for layer in of_layers if any(kind in layer.get("rope_type", "") for kind in CHANGING_ROPE)]
    limits = [layer.get("original_max_position_embeddings") or config.max_position_embeddings for layer in changing]
    return min(limits, default=None)


def has_dropout(model: nn.Module) -> bool:
    layers = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    return layers or bool(getattr(_base(model).config, "attention_dropout", 0.0))


def draws_beyond_dropout(model: nn.Module, calm: torch.Tensor, make_pass: Callable[[], torch.Tensor]) -> bool:
    """Whether a training pass draws random numbers besides dropout, e.g. embedding noise, router jitter or skipped
    layers. Cannot be detected if attention has dropout. Expects and leaves the model in evaluation mode, and restores
    random generators. `calm`: the result of `make_pass` in that mode."""
    if getattr(_base(model).config, "attention_dropout", 0.0):
        return False
    gpus = [device for device in {parameter.device for parameter in model.parameters()} if device.type == "cuda"]
    with torch.random.fork_rng(gpus):
        before = _random_states(gpus)
        model.train()
        for module in model.modules():
            if isinstance(module, (nn.modules.dropout._DropoutNd, GradientCheckpointingLayer)):
                module.training = False
        drawn = make_pass()
        model.eval()
        has_drawn = any(not torch.equal(*states) for states in zip(before, _random_states(gpus), strict=True))
    return has_drawn and not torch.equal(calm, drawn)


def _random_states(gpus: Sequence[torch.device]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]


def _base(model: nn.Module) -> PreTrainedModel:
    model = extract_model_from_parallel(model)  # DDP and DeepSpeed wrap the policy
    get = getattr(model, "get_base_model", None)
    base: PreTrainedModel = model if get is None else get()
    return base
