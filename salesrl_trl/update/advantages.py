"""Advantages with the frozen reference's reward as a part of the baseline, and sums of several rewards that compare.
The advantages of plain GRPO are TRL's."""

import torch

EPSILON = 1e-4  # added to the spread, as in TRL


def partly_scored(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Completions whose sum of rewards can't be compared with their group's: a function gave others of the group a
    number, and none to them. TRL would count it as 0. A function that gives nobody of a group a number is left out for
    all. `rewards`: shape (N, functions), of all ranks, one group after another; NaN without a number. Returns shape
    (N,), bool."""
    missing = rewards.isnan().view(-1, num_generations, rewards.size(1))  # (groups, n, functions)
    scored = (~missing).any(dim=2, keepdim=True)  # (groups, n, 1): a completion without any number says nothing
    applies = (~missing).any(dim=1, keepdim=True)  # (groups, 1, functions)
    return (missing & applies & scored).any(dim=2).flatten()


def hybrid_advantages(
    rewards: torch.Tensor, references: torch.Tensor, num_generations: int, weight: float, scale_rewards: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages with the baseline (1 - w) * mean of the group + w * reward of its row's reference answer.

        shift     = w * (mean - reference)                  0 where the row has no reference
        advantage = (reward - mean + shift) / (spread + 1e-4)
        spread^2  = std^2 + |shift| * (|shift| + std of the batch)

    `scale_rewards` selects the std of the group or of the batch. So without a shift, these are GRPO's advantages.

    With a shift, a group of equal rewards is not divided by almost nothing. Its advantage is about
    sqrt(shift / std of the batch) where this is small, and never more than 1. A group with one scored completion is
    such a group: its own reward is no baseline for it, but the reference's reward is. Without a reference it has no
    advantage, as in GRPO. A single scored completion in the whole batch has no advantage either: there is no spread.

    `rewards` and `references` have shape (N,), of all ranks, one group after another; NaN where there is none. A group
    has the mean of the references' rewards that were measured with its completions. `scale_rewards` is TRL's: `group`,
    `batch` or `none`. Returns

    - the advantages, shape (N,); 0 for a completion that could not be scored;
    - for each group with a scored completion, whether its reference was missing: shape (groups,), bool.
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
        # A single reward has no std. The std of the batch then scales its distance from the baseline.
        std = batch_std if scale_rewards == "batch" else _std(grouped, dim=1).nan_to_num(nan=0.0)  # (1,) or (G, 1)
        distance = shift.abs()
        advantages = advantages / (torch.sqrt(std**2 + distance * (distance + batch_std)) + EPSILON)
    return advantages.nan_to_num(nan=0.0).flatten(), missing[scored.any(dim=1)].flatten()


def _std(rewards: torch.Tensor, dim: int) -> torch.Tensor:
    """The std of the scored rewards, with Bessel's correction; NaN for fewer than two rewards, as in TRL."""
    count = (~rewards.isnan()).sum(dim=dim, keepdim=True)
    variance = ((rewards - rewards.nanmean(dim=dim, keepdim=True)) ** 2).nanmean(dim=dim, keepdim=True)
    return torch.sqrt(variance * torch.where(count > 1, count / (count - 1), torch.nan))
