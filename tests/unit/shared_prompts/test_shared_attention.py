"""Attention over a row: flash attention's two parts against padded batches."""

import types

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from salesrl_trl.shared_prompts import shared_attention
from salesrl_trl.shared_prompts.row_layout import Group, layout_of

CPU = torch.device("cpu")
GROUPS = {
    "several": [Group(5, (0, 1), (3, 4)), Group(1, (2,), (3,)), Group(7, (3, 4, 5), (1, 0, 6))],
    "no prefix": [Group(1, (0, 1), (3, 4))],
    "one sequence": [Group(9, (0,), (6,))],
}


def _parts(bounds):
    return list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))


def _scores(q, k, start, stop, keys, is_causal, scale):
    repeated = k[keys].repeat_interleave(q.size(1) // k.size(1), 1)
    scores = torch.einsum("qhd,khd->hqk", q[start:stop], repeated) * scale
    causal = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    return scores.masked_fill(~causal, -torch.inf) if is_causal else scores


def forward(q, k, v, bounds, scale):
    """What PyTorch's kernel computes, part by part."""
    q_bounds, k_bounds, most_q, most_k, is_causal = bounds
    out, normaliser = torch.zeros_like(q), torch.zeros(q.size(1), q.size(0))
    for (start, stop), (first, last) in zip(_parts(q_bounds), _parts(k_bounds), strict=True):
        assert 0 < stop - start <= most_q
        assert 0 < last - first <= most_k
        scores = _scores(q, k, start, stop, slice(first, last), is_causal, scale)
        values = v[first:last].repeat_interleave(q.size(1) // v.size(1), 1)
        normaliser[:, start:stop] = scores.logsumexp(-1)
        out[start:stop] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out, normaliser, torch.zeros(2), torch.zeros(2)


def backward(tensors, bounds, state, scale):
    """What PyTorch's kernel computes: the probabilities anew, from the normaliser and the output that are given."""
    grad, q, k, v, out, normaliser = tensors
    q_bounds, k_bounds, _, _, is_causal = bounds
    dq, dk, dv = (torch.zeros_like(each) for each in (q, k, v))
    times = q.size(1) // k.size(1)
    for (start, stop), (first, last) in zip(_parts(q_bounds), _parts(k_bounds), strict=True):
        queries, keys = slice(start, stop), slice(first, last)
        shares = (_scores(q, k, start, stop, keys, is_causal, scale) - normaliser[:, queries, None]).exp()
        own = (grad[queries] * out[queries]).sum(-1).T[..., None]
        inner = torch.einsum("qhd,khd->hqk", grad[queries], v[keys].repeat_interleave(times, 1))
        inner = shares * (inner - own) * scale
        dq[queries] += torch.einsum("hqk,khd->qhd", inner, k[keys].repeat_interleave(times, 1))
        dk[keys] += torch.einsum("hqk,qhd->khd", inner, q[queries]).unflatten(1, (-1, times)).sum(2)
        dv[keys] += torch.einsum("hqk,qhd->khd", shares, grad[queries]).unflatten(1, (-1, times)).sum(2)
    return dq, dk, dv


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_both_parts_joined_are_one_attention_forward_and_backward(monkeypatch, groups):
    monkeypatch.setattr(shared_attention, "forward", forward)
    monkeypatch.setattr(shared_attention, "backward", backward)
    layout = layout_of(groups, 20, 8, CPU)
    layer = types.SimpleNamespace(num_key_value_groups=2, is_causal=True, training=True)
    found = []
    for flashes in (True, False):
        monkeypatch.setattr(shared_attention, "can_flash", lambda *_, flashes=flashes: flashes)
        draw = torch.Generator().manual_seed(0)
        given = [torch.randn(1, heads, len(layout.source), 8, generator=draw).requires_grad_() for heads in (4, 2, 2)]
        out = shared_attention.shared_attention(sdpa_attention_forward, layer, *given, layout)
        (out * torch.randn(out.shape, generator=draw)).sum().backward()
        found.append((out.detach(), *(each.grad for each in given)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("kind", "width", "capability", "takes"),
    [
        (torch.float16, 256, (8, 0), True),
        (torch.float32, 128, (9, 0), False),
        (torch.bfloat16, 264, (9, 0), False),
        (torch.bfloat16, 100, (9, 0), False),  # PyTorch's attention pads it, its kernel refuses it
        (torch.float16, 128, (7, 5), False),
    ],
)
def test_what_the_kernels_refuse_is_not_given_to_them(monkeypatch, kind, width, capability, takes):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    tensor = types.SimpleNamespace(is_cuda=True, dtype=kind, device=None, size=lambda _: width)
    assert shared_attention.can_flash(tensor, tensor, tensor) == takes


def test_without_a_layout_an_attention_is_what_it_was():
    shared_attention.install("sdpa")
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 2, 5, 8, generator=draw) for _ in range(3)]
    layer = types.SimpleNamespace(num_key_value_groups=1, is_causal=True)
    installed = shared_attention.ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert torch.equal(installed(layer, *given, None)[0], sdpa_attention_forward(layer, *given, None)[0])
    with pytest.raises(RuntimeError, match="keyword arguments"):
        installed(layer, *given, torch.ones((1, 1, 1, 1), dtype=torch.bool))
