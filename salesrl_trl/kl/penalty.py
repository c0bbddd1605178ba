"""The branches' KL inside TRL's loss: the per-token penalty, and the sums behind figures and control.

Owns no normaliser: TRL has one for each `loss_type`. `branched` calls it.

The estimators, with x = log pi_ref(token) - log pi(token) of a token that pi sampled
(J. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html):

    k1 = -x              unbiased, high variance
    k2 = x^2 / 2         biased, low variance
    k3 = e^x - 1 - x     unbiased, never negative; TRL has this one

The average gradient of each depends on whether the importance ratio is a factor of it (`use_bias_correction_kl`):

              with the ratio          without the ratio
    k1        gradient of the KL      zero
    k2        gradient of E[k2]       gradient of the KL
    k3        gradient of the KL      gradient of KL(pi_ref || pi)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

ESTIMATORS = ("k1", "k2", "k3")
LARGEST_CLAMP = 40.0  # in nats. The ratio times k3 grows as e^(2 * clamp), which overflows float32 above 44.
LEAST_LOGP = -1000.0
"""In nats. Lower log-probs are raised to it. A token outside a masked vocabulary has -inf, and the difference of two
would be NaN."""
SUMS = ("kl", "penalty", "clamped", "tokens", "weight")  # sums of each branch; `BranchPenalty.sums` describes them
MicroBatch = dict[str, Any]  # TRL's micro-batch: tensors, of which some may be `None`, and numbers by name
_LOGPS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")


def estimate(log_ratio: torch.Tensor, estimator: str) -> torch.Tensor:
    """KL of each token in nats, by one of `ESTIMATORS`. `log_ratio` is log pi_ref - log pi, of any shape."""
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio**2 / 2
    return torch.exp(log_ratio) - log_ratio - 1  # TRL's order of operations


def penalty(
    log_ratio: torch.Tensor, log_importance: torch.Tensor | None, estimator: str, clamp: float
) -> torch.Tensor:
    """The penalty of each token, shape (B, T), which the loss multiplies by a coefficient.

    Within +-clamp the penalty is `ratio * estimate(x)`, with ratio = exp(log_importance) or 1. Beyond, the estimate
    continues as its tangent at +-clamp, so that nothing overflows:

        x > clamp:    ratio * (estimate(clamp) + estimate'(clamp) * (x - clamp))        and likewise for x < -clamp

    The gradient still pulls the policy back. Without a ratio it is the tangent's gradient. With a ratio, which is then
    detached, it is the gradient of a line of slope `clamp`:

        gradient = -sign(x) * clamp * ratio * grad log pi

    The reason: inside, the whole gradient of ratio * k3 is -x * ratio * grad log pi, since e^x cancels between the two
    factors. So the gradient has no jump at the clamp (k1's jumps by 1, k2's by clamp^2 / 2). The value is still the
    estimate: figures and control read it.

    `log_ratio` is log pi_ref - log pi, shape (B, T). `log_importance` is the log of the importance ratio, shape (B, T)
    or (B, 1), and is clamped to +-clamp before the exponential. `clamp` is in nats. 0 means no clamp: TRL's own
    formula.
    """
    if not clamp:
        kl = estimate(log_ratio, estimator)
        return kl if log_importance is None else kl * torch.exp(log_importance)
    ratio = torch.ones_like(log_ratio)
    if log_importance is not None:
        ratio = torch.exp(log_importance.clamp(-clamp, clamp)).expand_as(log_ratio)
    nearest = log_ratio.clamp(-clamp, clamp)
    inside = ratio * estimate(nearest, estimator)
    corner = nearest.detach()
    beyond = estimate(corner, estimator) + _derivative(corner, estimator) * (log_ratio - corner)
    if log_importance is not None:
        pull = clamp * log_ratio.abs()
        beyond = ratio.detach() * (beyond.detach() + pull - pull.detach())
    return torch.where(log_ratio.abs() <= clamp, inside, beyond)


def _derivative(log_ratio: torch.Tensor, estimator: str) -> torch.Tensor:
    if estimator == "k1":
        return -torch.ones_like(log_ratio)
    return log_ratio if estimator == "k2" else torch.exp(log_ratio) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PenaltySettings:
    estimator: str = "k3"
    clamp: float = 10.0  # largest log-ratio in nats before the exponential; 0 for no clamp
    bias_correction: bool = True  # multiply by the importance ratio, as TRL does with `use_bias_correction_kl`
    level: str = "token"  # TRL's `importance_sampling_level`: `token` or `sequence`
    off_policy: bool = False
    """Whether earlier weights may have sampled. Penalty and measured KL are then multiplied by the ratio to them."""


class BranchPenalty:
    """Takes the place of the number `beta` in TRL's `_compute_loss`, for one micro-batch.

    TRL uses that number in two ways only (`tests/upstream` pins them): `beta != 0.0`, and `beta * per_token_kl` where
    the KL joins the per-token loss. Here the product is the sum over branches b of beta_b * penalty_b, shape (B, T).
    All that follows in the loss stays TRL's own. The policy's log-probs come from TRL's one forward pass, through
    `record_logps`.

    With `off_policy`, an earlier policy has sampled. The penalty is then also multiplied by the policy at the start of
    the step over that sampler: TRL's `importance_sampling_ratio`, with the bounds of the policy's loss.

    `inputs` is TRL's micro-batch, with `branch_ids` of shape (B,). `shares` say by branch id how much the rewards of
    each branch count: advantages are multiplied, to which every policy loss of TRL is in proportion.
    """

    def __init__(
        self, inputs: MicroBatch, betas: Sequence[float], settings: PenaltySettings, shares: Sequence[float] = ()
    ) -> None:
        self._settings = settings
        self._branch_ids = inputs["branch_ids"]  # (B,)
        self._branches = len(betas)
        self._mask = loss_mask(inputs)  # (B, T)
        # Non-blocking: a blocking copy would wait for the whole backward pass of the last micro-batch.
        by_branch = torch.tensor(betas).to(self._branch_ids.device, non_blocking=True)
        self._betas = by_branch[self._branch_ids].unsqueeze(1)  # (B, 1)
        self.inputs = {
            name: bounded(value, self._mask) if name in _LOGPS and value is not None else value
            for name, value in inputs.items()
        }
        """The micro-batch, with log-probs that are finite wherever a token counts and 0 elsewhere."""
        if any(share != 1 for share in shares):
            advantages = inputs["advantages"]  # (B,) or (B, T)
            by_branch = torch.tensor(shares).to(advantages, non_blocking=True)[self._branch_ids]  # (B,)
            self.inputs["advantages"] = advantages * by_branch.view(-1, *[1] * (advantages.dim() - 1))
        self._logps: torch.Tensor | None = None
        self._log_ratio = self._penalty = self._weight = torch.empty(0)

    def record_logps(self, per_token_logps: torch.Tensor) -> torch.Tensor:
        """Keep the policy's log-probs, shape (B, T). Returns them `bounded`, for the loss."""
        self._logps = bounded(per_token_logps, self._mask)
        return self._logps

    def __ne__(self, other: object) -> bool:
        """`beta != 0.0`: always true, there is a penalty."""
        return True

    def __mul__(self, per_token_kl: torch.Tensor) -> torch.Tensor:
        """`beta * per_token_kl`: the branches' penalty, 0 where no token counts. Shape (B, T)."""
        if self._logps is None:
            raise RuntimeError("the penalty was asked for before `record_logps` was given the policy's log-probs")
        settings, logps = self._settings, self._logps.to(torch.promote_types(self._logps.dtype, torch.float32))
        self._log_ratio = self.inputs["ref_per_token_logps"] - logps
        importance = log_importance(logps, self.inputs.get("old_per_token_logps"), self._mask, settings.level)
        self._penalty = penalty(
            self._log_ratio, importance if settings.bias_correction else None, settings.estimator, settings.clamp
        )
        self._weight = torch.ones_like(logps)
        if settings.off_policy:
            self._carry_sampler_ratio(importance.detach())
        return torch.where(self._mask, self._betas * self._penalty, 0.0)

    def _carry_sampler_ratio(self, importance: torch.Tensor) -> None:
        """Multiply the penalty by the part of the ratio to the sampler that it lacks. `importance`: the log of the
        policy's ratio to `old_per_token_logps`, (B, T) or (B, 1). If the sampler gives no log-probs, the old ones are
        its own."""
        settings, limit = self._settings, self._settings.clamp or torch.inf
        own = torch.exp(importance.clamp(-limit, limit))  # (B, T) or (B, 1)
        sampler_ratio = self.inputs.get("importance_sampling_ratio")  # (B, T), or (B, 1) of whole completions
        stale = 1.0 if sampler_ratio is None else sampler_ratio
        if sampler_ratio is None and not settings.bias_correction:
            stale = own
        self._penalty = self._penalty * stale
        self._weight = self._weight * (own if sampler_ratio is None else stale * own)

    def sums(self) -> torch.Tensor:
        """The measured sums of each branch, without a gradient: shape (branches, 5), float64. Columns, as in `SUMS`:

        - the KL by k1, whatever the loss has, and the penalty without its coefficient, both in nats;
        - the number of tokens whose log-ratio lies beyond the clamp, and of all tokens;
        - the weights of the tokens, by which the sums of both are divided. On-policy a weight is 1, otherwise
          the ratio to the sampler, and 0 for a token that TRL's correction removes.
        """
        log_ratio, clamp = self._log_ratio.detach(), self._settings.clamp
        clamped = log_ratio.abs() > (clamp or torch.inf)
        ones = torch.ones_like(log_ratio)
        k1 = self._weight * estimate(log_ratio, "k1")
        per_token = torch.stack([k1, self._penalty.detach(), clamped.to(ones.dtype), ones, self._weight])
        counted = torch.where(self._mask, per_token, 0)  # (len(SUMS), B, T)
        per_sample = counted.sum(dim=2, dtype=torch.float64)  # (len(SUMS), B)
        totals = per_sample.new_zeros(len(SUMS), self._branches)
        return totals.index_add_(1, self._branch_ids, per_sample).T.contiguous()  # NCCL reduces only contiguous ones


def loss_mask(inputs: MicroBatch) -> torch.Tensor:
    """The tokens that count: those of the completion that the policy wrote itself. Shape (B, T), bool."""
    mask: torch.Tensor = inputs["completion_mask"]
    return mask.bool() if "tool_mask" not in inputs else mask.bool() & inputs["tool_mask"].bool()


def bounded(per_token_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-probs of at least `LEAST_LOGP`, and 0 where no token counts. The NaN of a token that counts stays NaN: the
    policy or the reference is broken, and must not look healthy."""
    return torch.where(mask, per_token_logps, 0.0).clamp(min=LEAST_LOGP)


def log_importance(
    per_token_logps: torch.Tensor, old_per_token_logps: torch.Tensor | None, mask: torch.Tensor, level: str
) -> torch.Tensor:
    """Log of TRL's importance ratio, (B, T), or (B, 1) for the `level` `sequence`. The gradient flows through the
    policy only. Without `old_per_token_logps`, the policy's own take their place."""
    old = per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps
    log_ratio = per_token_logps - old
    if level == "token":
        return log_ratio
    return (log_ratio * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
