"""The effect of TRL's correction for completions that an earlier policy sampled.

Owns the figures. Refuses to correct anything: TRL computes the importance ratio and bounds it.
"""

import torch


def correction_sums(
    ratio: torch.Tensor, mask: torch.Tensor, mode: str, low: float | None, high: float | None
) -> torch.Tensor:
    """Count what TRL's correction for the sampler's distribution left out or bounded.

    `ratio` has the importance ratios as the loss has them: (B, T), or (B, 1) for those of whole completions. `mask` is
    the completion mask, (B, T). `mode`, `low` and `high`: `vllm_importance_sampling_mode`, `_clip_min`, `_clip_max`.
    Returns the number of tokens or completions left out, bounded, and in all: shape (3,), float64.
    """
    counts = mask.any(dim=1, keepdim=True) if ratio.size(1) == 1 else mask.bool()
    left_out = (ratio == 0) if mode.endswith("_mask") else torch.zeros_like(counts)
    bounded = torch.zeros_like(counts)
    if mode.endswith("_truncate"):
        for bound, beyond in ((low, torch.le), (high, torch.ge)):
            if bound is not None:
                bounded = bounded | beyond(ratio, bound)
    return torch.stack([(which & counts).sum() for which in (left_out, bounded, counts)]).to(torch.float64)
