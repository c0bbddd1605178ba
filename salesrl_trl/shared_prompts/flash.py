"""Flash attention over a row with shared prefixes, by PyTorch's own kernels. Called by `shared_attention`.

Each prefix and each segment sees itself, causally; all segments of a group together see their prefix, without a mask.
Two softmaxes over parts of the keys make one over all: each is weighted by its share of the normaliser. Backward, each
part gives its share of the gradient from the joined normaliser and output (Dao et al. 2022, appendix B.2).
"""

from typing import Any

import torch

from salesrl_trl.shared_prompts.row_layout import Bounds, Layout

HALVES = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256
"""Channels of a head that the kernels take."""
AMPERE = (8, 0)
"""Compute capability of the oldest GPUs that they run on."""


def can_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernels take these: 16 bits, on an Ampere GPU or a newer one, heads of one width that is a multiple
    of 8."""
    width = query.size(-1)
    return (
        query.is_cuda
        and query.dtype in HALVES
        and width == key.size(-1) == value.size(-1)
        and width <= LARGEST_HEAD
        and width % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= AMPERE
    )


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, scale: float) -> tuple[Any, ...]:
    """PyTorch's kernel: output of shape (tokens, heads, channels), log of the normaliser of shape (heads, tokens),
    float32, and the state of its random generator."""
    q_bounds, k_bounds, most_q, most_k, is_causal = bounds
    outputs: tuple[Any, ...] = torch.ops.aten._flash_attention_forward(
        q, k, v, q_bounds, k_bounds, most_q, most_k, 0.0, is_causal, False, scale=scale
    )
    return outputs[:4]


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    normaliser: torch.Tensor,
    bounds: Bounds,
    state: tuple[torch.Tensor, torch.Tensor],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PyTorch's kernel: gradients to `q`, `k` and `v`."""
    q_bounds, k_bounds, most_q, most_k, is_causal = bounds
    return torch.ops.aten._flash_attention_backward(  # type: ignore[no-any-return]
        grad, q, k, v, out, normaliser, q_bounds, k_bounds, most_q, most_k, 0.0, is_causal, *state, scale=scale
    )


class SharedFlash(torch.autograd.Function):
    """Attention over a row: `apply(query, key, value, layout, scale)`. Queries and output have shape (S, heads,
    channels); keys and values (S, heads of keys, channels)."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, scale: float
    ) -> torch.Tensor:
        out: torch.Tensor
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
        own = backward(grad, query, key, value, out, normaliser, layout.parts, tuple(states[:2]), scale)
        if layout.prefixes:
            head, tail = layout.prefix_tokens, layout.prefix_tokens + layout.crossing_tokens
            crossing = backward(
                grad[head:tail], query[head:tail], key[:head], value[:head], out[head:tail],
                normaliser[:, head:tail].contiguous(), layout.crossings, tuple(states[2:]), scale,
            )  # fmt: skip
            for total, part, rows in zip(own, crossing, (slice(head, tail), slice(head), slice(head)), strict=True):
                total[rows] += part
        return *own, None, None
