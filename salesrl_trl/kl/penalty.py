"""The branches' KL inside TRL's loss.

Owns the per-token penalty, the per-branch sums behind metrics and control, and the object that brings the penalty into
`GRPOTrainer._compute_loss`. Owns no normaliser: that is TRL's, of whatever `loss_type`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from salesrl_trl.kl.estimators import estimate, penalty

LEAST_LOGP = -1000.0
"""In nats. A log-probability below it counts as this: a token outside a masked vocabulary has none (-inf), and the
difference of two such tokens would be NaN."""
SUMS = ("kl", "k1", "clamped", "tokens", "weight")
"""What is summed for each branch."""
_LOGPS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")


@dataclass(frozen=True, kw_only=True, slots=True)
class PenaltySettings:
    """How the KL of a token is estimated and weighed."""

    estimator: str = "k3"
    """One of `estimators.ESTIMATORS`."""
    clamp: float = 10.0
    """Largest log-ratio in nats before the exponential; 0 for none."""
    bias_correction: bool = True
    """Multiply by the importance ratio, as TRL's `use_bias_correction_kl`."""
    level: str = "token"
    """TRL's `importance_sampling_level`: `token` or `sequence`."""
    off_policy: bool = False
    """Whether earlier weights may have sampled. Penalty and measured KL then carry the ratio to the sampler."""


class BranchPenalty:
    """Stands where TRL's `_compute_loss` has the number `beta`, for one micro-batch.

    TRL uses the number in two ways only (`tests/upstream` pins them): `beta != 0.0`, and `beta * per_token_kl` where
    the KL joins the per-token loss. Here the product is the branches' penalty instead,

        sum over branches b of beta_b * penalty_b        (B, T)

    so whatever TRL does to the per-token loss afterwards, the normaliser of each `loss_type` included, is TRL's own.
    Where an earlier policy sampled (`off_policy`) the penalty is multiplied by the ratio of the policy, as it was when
    the step began, over that sampler: TRL's `importance_sampling_ratio`, with the bounds that the policy's loss has.
    The policy's log-probs are those of TRL's one forward, handed over by `see`.

    Args:
        inputs (`Mapping[str, Any]`):
            TRL's micro-batch, with `branch_ids` of shape (B,).
        betas (`Sequence[float]`):
            Coefficients by branch id.
        settings (`PenaltySettings`):
            Estimator, clamp and correction.
    """

    def __init__(self, inputs: Mapping[str, Any], betas: Sequence[float], settings: PenaltySettings) -> None:
        self._settings = settings
        self._branch_ids = inputs["branch_ids"]  # (B,)
        self._branches = len(betas)
        self._mask = loss_mask(inputs)  # (B, T)
        # Not blocking: waiting for the copy would wait for all of the last micro-batch's backward pass.
        by_branch = torch.tensor(betas).to(self._branch_ids.device, non_blocking=True)
        self._betas = by_branch[self._branch_ids].unsqueeze(1)  # (B, 1)
        self._inputs = {
            name: bounded(value, self._mask) if name in _LOGPS and value is not None else value
            for name, value in inputs.items()
        }
        self._logps: torch.Tensor | None = None
        self._log_ratio = self._penalty = self._weight = torch.empty(0)

    @property
    def inputs(self) -> dict[str, Any]:
        """The micro-batch, with log-probs that are finite wherever a token counts and 0 elsewhere."""
        return self._inputs

    def see(self, per_token_logps: torch.Tensor) -> torch.Tensor:
        """Take the policy's log-probs, shape (B, T), on their way to the loss; returns them `bounded`."""
        self._logps = bounded(per_token_logps, self._mask)
        return self._logps

    def __ne__(self, other: object) -> bool:
        """`beta != 0.0`: there is a penalty."""
        return True

    def __mul__(self, per_token_kl: torch.Tensor) -> torch.Tensor:
        """`beta * per_token_kl`: the branches' own in place of TRL's, 0 where no token counts. Shape (B, T)."""
        if self._logps is None:
            raise RuntimeError("the penalty was asked for before `see` was given the policy's log-probs")
        settings, logps = self._settings, self._logps.to(torch.promote_types(self._logps.dtype, torch.float32))
        self._log_ratio = self._inputs["ref_per_token_logps"] - logps
        importance = log_importance(logps, self._inputs.get("old_per_token_logps"), self._mask, settings.level)
        self._penalty = penalty(
            self._log_ratio, importance if settings.bias_correction else None, settings.estimator, settings.clamp
        )
        self._weight = torch.ones_like(logps)
        if settings.off_policy:
            self._carry_sampler_ratio(importance.detach())
        return torch.where(self._mask, self._betas * self._penalty, 0.0)

    def _carry_sampler_ratio(self, importance: torch.Tensor) -> None:
        """Multiply the penalty by what of the ratio to the sampler it does not have yet.

        Args:
            importance (`torch.Tensor`):
                Log of the policy's ratio to `old_per_token_logps`, shape (B, T) or (B, 1). Where no sampler tells its
                log-probs, those old ones are the sampler's.
        """
        settings, limit = self._settings, self._settings.clamp or torch.inf
        own = torch.exp(importance.clamp(-limit, limit))  # (B, T) or (B, 1)
        given = self._inputs.get("importance_sampling_ratio")  # (B, T), or (B, 1) of whole completions
        stale = 1.0 if given is None else given
        if given is None and not settings.bias_correction:
            stale = own
        self._penalty = self._penalty * stale
        self._weight = self._weight * (own if given is None else stale * own)

    def sums(self) -> torch.Tensor:
        """What was measured, without a gradient.

        Returns:
            `torch.Tensor` of shape (branches, 5), float64, by `SUMS`: the penalty without its coefficient and k1 in
            nats, tokens whose log-ratio lies beyond the clamp, tokens; and the tokens' weights, by which the sums of
            both KLs are divided. A weight is 1 on-policy, else the ratio to the sampler, 0 of what it leaves out.
        """
        log_ratio, clamp = self._log_ratio.detach(), self._settings.clamp
        clamped = log_ratio.abs() > (clamp or torch.inf)
        one = torch.ones_like(log_ratio)
        k1 = self._weight * estimate(log_ratio, "k1")
        per_token = torch.stack([self._penalty.detach(), k1, clamped.to(one.dtype), one, self._weight])
        counted = torch.where(self._mask, per_token, 0)  # (len(SUMS), B, T)
        per_sample = counted.sum(dim=2, dtype=torch.float64)  # (len(SUMS), B)
        totals = per_sample.new_zeros(len(SUMS), self._branches)
        return totals.index_add_(1, self._branch_ids, per_sample).T.contiguous()  # NCCL reduces no other


def loss_mask(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Which tokens count: those of the completion that the policy wrote itself. Shape (B, T), bool."""
    mask: torch.Tensor = inputs["completion_mask"]
    return mask.bool() if "tool_mask" not in inputs else mask.bool() & inputs["tool_mask"].bool()


def bounded(per_token_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-probs of at least `LEAST_LOGP`, and 0 where no token counts, whatever stood there.

    A NaN where a token does count stays one: the policy or the reference is broken, and must not look healthy.
    """
    return torch.where(mask, per_token_logps, 0.0).clamp(min=LEAST_LOGP)


def log_importance(
    per_token_logps: torch.Tensor, old_per_token_logps: torch.Tensor | None, mask: torch.Tensor, level: str
) -> torch.Tensor:
    """Log of TRL's importance ratio; its gradient is the policy's.

    Args:
        per_token_logps (`torch.Tensor`):
            The policy's, shape (B, T).
        old_per_token_logps (`torch.Tensor`, *optional*):
            Those of the policy that sampled, shape (B, T); the policy's own when not given.
        mask (`torch.Tensor`):
            Shape (B, T), bool.
        level (`str`):
            `token` or `sequence`.

    Returns:
        `torch.Tensor` of shape (B, T), or (B, 1) for sequences.
    """
    old = per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps
    log_ratio = per_token_logps - old
    if level == "token":
        return log_ratio
    return (log_ratio * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
