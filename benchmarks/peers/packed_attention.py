"""Attention over rows of several lengths that stand one behind the other, where the arms of others ask for
FlashAttention: PyTorch's own kernel. transformers knows it as `attn_implementation: packed` once this is imported."""

from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface


def varlen(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any, softmax_scale: float | None = None, **_: Any
) -> Any:
    """FlashAttention's call, answered by PyTorch's attention. q, k, v are (tokens, heads, size). Causal: a row's last
    query sees all its keys, of which there may be more than queries."""
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    if not q.is_cuda:  # its kernel is for GPUs
        done = []
        for (start_q, end_q), (start_k, end_k) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
            part = [each.transpose(0, 1) for each in (q[start_q:end_q], k[start_k:end_k], v[start_k:end_k])]
            keys, queries = end_k - start_k, end_q - start_q
            seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
            done.append(scaled_dot_product_attention(*part, attn_mask=seen, scale=softmax_scale).transpose(0, 1))
        return torch.cat(done)
    return varlen_attn(
        q.contiguous(), k.contiguous(), v.contiguous(), cu_q, cu_k, int(max_q), int(max_k),
        scale=softmax_scale, window_size=(-1, 0),
    )  # fmt: skip


def bounds(position_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """First tokens of the rows and the end, shape (rows + 1,), and the longest row. `position_ids` is (1, tokens)."""
    known = getattr(position_ids, "bounds", None)  # another layer asked
    if known is None:
        starts = torch.nonzero(position_ids[0] == 0)[:, 0].to(torch.int32)
        ends = torch.cat((starts, starts.new_tensor([position_ids.shape[1]])))
        known = position_ids.bounds = ends, int(ends.diff().max())  # type: ignore[attr-defined]
    return known


def packed(
    module: torch.nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None,
    position_ids: Any = None, **_: Any,
) -> tuple[Any, None]:  # fmt: skip
    """As transformers calls attention. query is (1, heads, tokens, size)."""
    starts, longest = bounds(position_ids)
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    return varlen(q, k, v, starts, starts, longest, longest, scaling)[None], None


AttentionInterface.register("packed", packed)
AttentionMaskInterface.register("packed", lambda *_, **__: None)
