"""Figures of TRL's correction for a sampler that lies behind the policy."""

import math

import pytest
import torch

from salesrl_trl.rollout.model_passes import correction_sums


def corrected(ratio, mode, low, high):
    """What TRL 1.16 makes of importance ratios."""
    if mode.endswith("_truncate"):
        return ratio if low is None and high is None else ratio.clamp(min=low, max=high)
    beyond = (ratio < (-math.inf if low is None else low)) | (ratio > (math.inf if high is None else high))
    return ratio.masked_fill(beyond, 0.0)


def counted(raw, mask, mode, low, high):
    """What is left out or bounded, by a loop over ratios before their correction."""
    left_out = bounded = count = 0
    for ratios, marks in zip(raw.tolist(), mask.tolist(), strict=True):
        if mode.startswith("sequence"):
            marks = [int(any(marks))]
        for ratio, mark in zip(ratios, marks, strict=True):
            if mark:
                beyond = (low is not None and ratio < low) or (high is not None and ratio > high)
                count += 1
                left_out += beyond and mode.endswith("_mask")
                bounded += beyond and mode.endswith("_truncate")
    return [left_out, bounded, count]


@pytest.mark.parametrize("mode", ["token_mask", "token_truncate", "sequence_mask", "sequence_truncate"])
@pytest.mark.parametrize(("low", "high"), [(0.5, 2.0), (None, 3.0), (0.7, None), (None, None), (0.1, 1.1)])
def test_the_sums_are_those_of_a_loop_over_ratios(mode, low, high):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        mask = (torch.rand(6, 5, generator=generator) < 0.6).long()
        mask[0] = 0  # a completion of which nothing is trained on
        raw = torch.randn(6, 1 if mode.startswith("sequence") else 5, generator=generator).exp()
        sums = correction_sums(corrected(raw, mode, low, high), mask, mode, low, high)
        assert sums.dtype == torch.float64
        assert sums.tolist() == counted(raw, mask, mode, low, high)


def test_a_ratio_on_a_bound_counts_as_bounded_in_the_numbers_own_format():
    for dtype in (torch.float32, torch.bfloat16):
        ratio = torch.tensor([[3.0, 1.0, 1.0]], dtype=dtype).clamp(min=1.1, max=2.3)
        sums = correction_sums(ratio, torch.ones(1, 3), "token_truncate", 1.1, 2.3)
        assert sums.tolist() == [0, 3, 3], dtype
