"""Attention over a row with shared prefixes, behind transformers' attention interface. `shared_passes` installs it.

On a GPU in 16 bits `flash` computes it. Elsewhere PyTorch's attention does, in two padded batches: over the prefixes,
and over the segments behind copies of their prefix's keys.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from salesrl_trl.shared_prompts.flash import SharedFlash, can_flash
from salesrl_trl.shared_prompts.row_layout import Layout

LAYOUT = "shared_prompts_layout"
"""Name of the argument that a model hands on to its attention, from its own keyword arguments."""
SDPA = "sdpa"
"""Name of PyTorch's attention. It takes a mask, which flash attention does not."""
OWN_TERMS = ("softcap", "s_aux", "position_bias")
"""Arguments for terms of the attention that the kernels here do not have."""


class LayoutLostError(RuntimeError):
    """The model does not hand its keyword arguments on to its attention, so that no layout gets there."""


def install(name: str) -> None:
    """Let transformers' attention of this name take a layout. Without one it stays what it is."""
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
    ) -> tuple[torch.Tensor, Any]:
        layout: Layout | None = kwargs.pop(LAYOUT, None)
        if layout is not None:
            return shared_attention(with_mask, module, query, key, value, layout, **kwargs), None
        if attention_mask is not None and attention_mask.shape == (1, 1, 1, 1) and key.size(2) > 1:
            raise LayoutLostError("the model does not hand its keyword arguments on to its attention")
        return inner(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]

    setattr(attention, LAYOUT, inner)
    ALL_ATTENTION_FUNCTIONS[name] = attention


def shared_attention(
    inner: Callable[..., tuple[torch.Tensor, Any]],
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
    """Attention over one row, of shape (1, S, heads, channels of a value). `inner` is an attention that takes a mask,
    in transformers' form. `query`: (1, heads, S, channels); `key` and `value`: (1, heads of keys, S, channels)."""
    if torch.is_autocast_enabled(query.device.type):
        kind = torch.get_autocast_dtype(query.device.type)
        query, key, value = (tensor.to(kind) for tensor in (query, key, value))
    plain = not dropout and all(kwargs.get(name) is None for name in OWN_TERMS)
    if plain and can_flash(query, key, value):
        scale = query.size(-1) ** -0.5 if scaling is None else scaling
        rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return SharedFlash.apply(*rows, layout, scale)[None]  # type: ignore[no-any-return, no-untyped-call]
    attend = functools.partial(inner, module, dropout=dropout, scaling=scaling, **kwargs)
    return _over_padded(attend, query, key, value, layout)


def _over_padded(
    attend: Callable[..., tuple[torch.Tensor, Any]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
) -> torch.Tensor:
    """As `shared_attention`, by two calls of `attend` with batches that are padded on the right:

    - the prefixes: all tensors of shape (groups with a prefix, heads, longest prefix, channels);
    - the segments: queries of shape (segments, heads, longest segment, channels); keys and values of each segment's
      prefix and itself, (segments, heads of keys, longest prefix + longest segment, channels).
    """
    padded = layout.padded
    parts = []
    if layout.prefixes:
        batch = [_gathered(tensor, padded.prefixes) for tensor in (query, key, value)]
        parts.append(attend(*batch, None, is_causal=True)[0].flatten(0, 1)[padded.prefix_places])
    queries = _gathered(query, padded.segments)
    keys, values = (_gathered(tensor, padded.keys) for tensor in (key, value))
    parts.append(attend(queries, keys, values, padded.mask)[0].flatten(0, 1)[padded.segment_places])
    return torch.cat(parts)[None]


def _gathered(row: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """From (1, heads, S, channels) to (B, heads, T, channels), at places of shape (B, T)."""
    taken = row[0].index_select(1, places.flatten())  # (heads, B * T, channels)
    return taken.view(len(taken), *places.shape, -1).transpose(0, 1)
