"""Advantages with the frozen reference's reward in the baseline, and comparable sums of several rewards. Plain GRPO
advantages are computed by TRL."""

import torch

EPSILON = 1e-4  # added to the standard deviation, as in TRL


def partly_scored(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Completions whose sum of rewards is not comparable within their group, because a function scored others of the
    group but not them, which TRL would count as 0. A function that scores no completion of a group is ignored there.
    `rewards`: shape (N, functions), over all ranks, group by group, NaN if unscored. Returns shape (N,), bool."""
    missing = rewards.isnan().view(-1, num_generations, rewards.size(1))  # (groups, n, functions)
    scored = (~missing).any(dim=2, keepdim=True)  # (groups, n, 1): entirely unscored completions are ignored
    applies = (~missing).any(dim=1, keepdim=True)  # (groups, 1, functions)
    return (missing & applies & scored).any(dim=2).flatten()


def hybrid_advantages(
    rewards: torch.Tensor, references: torch.Tensor, num_generations: int, weight: float, scale_rewards: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages with the baseline (1 - w) * group mean + w * reward of the row's reference answer.

        shift     = w * (mean - reference)                  0 where the row has no reference
        advantage = (reward - mean + shift) / (spread + 1e-4)
        spread^2  = std^2 + |shift| * (|shift| + std of the batch)

    `scale_rewards` selects the std of the group or of the batch. Without a shift, these are GRPO's advantages.

    With a shift, a zero-variance group is not divided by almost 0: its advantage is about sqrt(shift / std of the
    batch) where this is small, and at most 1. The same holds for a group with one scored completion, whose baseline is
    the reference's reward; without a reference its advantage is 0, as in GRPO. A single scored completion in the whole
    batch also gets 0, as the std is undefined.

    `rewards` and `references` have shape (N,), over all ranks, group by group, NaN if unavailable. Each group uses the
    mean of the reference rewards measured with its completions. `scale_rewards` is TRL's: `group`, `batch` or `none`.
    Returns

    - the advantages, shape (N,); 0 for unscored completions;
    - for each group with a scored completion, whether it lacked a reference: shape (groups,), bool.
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
        # A single reward lacks a std; then the batch's std scales its distance from the baseline.
        std = batch_std if scale_rewards == "batch" else _std(grouped, dim=1).nan_to_num(nan=0.0)  # (1,) or (G, 1)
        distance = shift.abs()
        advantages = advantages / (torch.sqrt(std**2 + distance * (distance + batch_std)) + EPSILON)
    return advantages.nan_to_num(nan=0.0).flatten(), missing[scored.any(dim=1)].flatten()


def _std(rewards: torch.Tensor, dim: int) -> torch.Tensor:
    """The std of the scored rewards, with Bessel's correction; NaN for fewer than two, as in TRL."""
    count = (~rewards.isnan()).sum(dim=dim, keepdim=True)
    variance = ((rewards - rewards.nanmean(dim=dim, keepdim=True)) ** 2).nanmean(dim=dim, keepdim=True)
    return torch.sqrt(variance * torch.where(count > 1, count / (count - 1), torch.nan))
