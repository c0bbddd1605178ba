"""What TRL's correction leaves out of a sampler that lies behind the policy."""

import math

import pytest
import torch

from salesrl_trl.rollout.model_passes import left_out_sums


def corrected(ratio, mode, low, high):
    """What TRL 1.16 makes of importance ratios."""
    if mode.endswith("_truncate"):
        return ratio if low is None and high is None else ratio.clamp(min=low, max=high)
    beyond = (ratio < (-math.inf if low is None else low)) | (ratio > (math.inf if high is None else high))
    return ratio.masked_fill(beyond, 0.0)


def counted(raw, mask, mode, low, high):
    """What is left out, by a loop over ratios before their correction."""
    left_out = count = 0
    for ratios, marks in zip(raw.tolist(), mask.tolist(), strict=True):
        marks = [int(any(marks))] if mode.startswith("sequence") else marks
        for ratio in (ratio for ratio, mark in zip(ratios, marks, strict=True) if mark):
            beyond = (low is not None and ratio < low) or (high is not None and ratio > high)
            count += 1
            left_out += beyond and mode.endswith("_mask")
    return [left_out, count]


@pytest.mark.parametrize("mode", ["token_mask", "token_truncate", "sequence_mask"])
@pytest.mark.parametrize(("low", "high"), [(0.5, 2.0), (None, 3.0), (None, None)])
def test_the_sums_are_those_of_a_loop_over_ratios(mode, low, high):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        mask = (torch.rand(6, 5, generator=generator) < 0.6).long()
        mask[0] = 0  # a completion of which nothing is trained on
        raw = torch.randn(6, 1 if mode.startswith("sequence") else 5, generator=generator).exp()
        sums = left_out_sums(corrected(raw, mode, low, high), mask, mode)
        assert sums.dtype == torch.float64
        assert sums.tolist() == counted(raw, mask, mode, low, high)
