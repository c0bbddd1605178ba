"""Advantages against a baseline that is partly the frozen reference's reward.

Pure functions of tensors. Plain GRPO's advantages are TRL's own and never computed here.
"""

import torch

EPSILON = 1e-4
"""TRL's, under the spread."""


def hybrid_advantages(
    rewards: torch.Tensor,
    references: torch.Tensor,
    num_generations: int,
    weight: float,
    scale_rewards: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages with the baseline (1 - w) * mean of the group + w * reward of its row's reference answer.

        shift     = w * (mean - reference)                  0 where the row has no reference
        advantage = (reward - mean + shift) / (spread + 1e-4)
        spread^2  = std^2 + |shift| * (|shift| + std of the batch)

    std is the group's or the batch's, as `scale_rewards` says, so that without a shift these are GRPO's. With one, a
    group of equal rewards is not divided by almost nothing: its advantage is about the root of shift / std of the
    batch where that is small, and never more than 1. A group with one scored completion is such a group: its own
    reward is no baseline for it, but the reference's is. Without a reference it has no advantage, as in GRPO. Nor has
    the one scored completion of a whole batch, which has no spread.

    Args:
        rewards (`torch.Tensor`):
            Shape (N,), all ranks', groups one behind the other; NaN for a completion that could not be scored.
        references (`torch.Tensor`):
            Shape (N,): the reference answer's reward as measured beside each completion, NaN where there is none. A
            group's is their mean.
        num_generations (`int`):
            Completions in a group.
        weight (`float`):
            w in [0, 1].
        scale_rewards (`str`):
            TRL's: `group`, `batch` or `none`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: advantages of shape (N,), 0 for what could not be scored; and for each
        group with a scored completion whether its reference was missing, shape (groups,), bool.
    """
    grouped = rewards.view(-1, num_generations)  # (G, n)
    scored = ~grouped.isnan()  # (G, n)
    mean = grouped.nanmean(dim=1, keepdim=True)  # (G, 1)
    reference = references.view(-1, num_generations).nanmean(dim=1, keepdim=True)  # (G, 1)
    missing = reference.isnan()  # (G, 1)
    shift = torch.where(missing, 0.0, weight * (mean - reference))  # (G, 1)
    advantages = grouped - mean + shift  # (G, n)
    if scale_rewards != "none":
        batch_std = _std(rewards, dim=0)  # (1,)
        # one reward does not vary, with the spread of the batch left to say how much its distance is worth
        std = batch_std if scale_rewards == "batch" else _std(grouped, dim=1).nan_to_num(nan=0.0)  # (1,) or (G, 1)
        distance = shift.abs()
        advantages = advantages / (torch.sqrt(std**2 + distance * (distance + batch_std)) + EPSILON)
    return advantages.nan_to_num(nan=0.0).flatten(), missing[scored.any(dim=1)].flatten()


def _std(rewards: torch.Tensor, dim: int) -> torch.Tensor:
    """With Bessel's correction, over what was scored; NaN for fewer than two rewards, as TRL's."""
    count = (~rewards.isnan()).sum(dim=dim, keepdim=True)
    variance = ((rewards - rewards.nanmean(dim=dim, keepdim=True)) ** 2).nanmean(dim=dim, keepdim=True)
    return torch.sqrt(variance * torch.where(count > 1, count / (count - 1), torch.nan))
