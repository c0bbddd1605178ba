"""The branches' KL inside TRL's loss: the per-token penalty, and the sums used for metrics and control.

TRL normalises it according to `loss_type`. Called by `branched`.

The estimators, with x = log pi_ref(token) - log pi(token) of a token sampled from pi
(J. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html):

    k1 = -x              unbiased, high variance
    k2 = x^2 / 2         biased, low variance
    k3 = e^x - 1 - x     unbiased, never negative; used by TRL

The expected gradient of each depends on whether it is multiplied by the importance ratio (`use_bias_correction_kl`):

              with the ratio          without the ratio
    k1        gradient of the KL      zero
    k2        gradient of E[k2]       gradient of the KL
    k3        gradient of the KL      gradient of KL(pi_ref || pi)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

ESTIMATORS = ("k1", "k2", "k3")
LARGEST_CLAMP = 40.0  # in nats. The ratio times k3 grows as e^(2 * clamp), which overflows float32 above 44.
LEAST_LOGP = -1000.0
"""In nats; smaller log-probs are raised to it. Tokens outside a masked vocabulary have -inf, whose differences would
be NaN."""
SUMS = ("kl", "penalty", "clamped", "tokens", "weight")  # sums per branch, see `BranchPenalty.sums`
MicroBatch = dict[str, Any]  # TRL's micro-batch: tensors, some of which may be `None`, and numbers by name
FAILED = "is_failed"
"""Key in a micro-batch: which completions failed, shape (B,), bool. Absent if none of the generation batch did."""
_LOGPS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")


def estimate(log_ratio: torch.Tensor, estimator: str) -> torch.Tensor:
    """Each token's KL in nats, by one of `ESTIMATORS`. `log_ratio` is log pi_ref - log pi, of any shape."""
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio**2 / 2
    return torch.exp(log_ratio) - log_ratio - 1  # TRL's order of operations


def penalty(
    log_ratio: torch.Tensor, log_importance: torch.Tensor | None, estimator: str, clamp: float
) -> torch.Tensor:
    """Each token's penalty, shape (B, T), which the loss multiplies by a coefficient.

    Within +-clamp the penalty is `ratio * estimate(x)`, with ratio = exp(log_importance) or 1. Beyond, the estimate
    continues as its tangent at +-clamp, so that nothing overflows:

        x > clamp:    ratio * (estimate(clamp) + estimate'(clamp) * (x - clamp))        and likewise for x < -clamp

    The gradient still pulls the policy back. Without a ratio it is the tangent's gradient. With a ratio, which is
    detached there, it is the gradient of a line with slope `clamp`:

        gradient = -sign(x) * clamp * ratio * grad log pi

    The reason: inside, the full gradient of ratio * k3 is -x * ratio * grad log pi, since e^x cancels between the two
    factors. This makes the gradient continuous at the clamp (k1's jumps by 1, k2's by clamp^2 / 2). The value remains
    the estimate, which metrics and control use.

    `log_ratio` is log pi_ref - log pi, shape (B, T). `log_importance` is the log of the importance ratio, shape (B, T)
    or (B, 1), and is clamped to +-clamp before the exponential. `clamp` is in nats; 0 disables it, which is TRL's own
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
    clamp: float = 10.0  # maximum log-ratio in nats before the exponential; 0 disables the clamp
    bias_correction: bool = True  # multiply by the importance ratio, like TRL's `use_bias_correction_kl`
    level: str = "token"  # TRL's `importance_sampling_level`: `token` or `sequence`
    off_policy: bool = False
    """Whether completions may come from earlier weights. Penalty and KL are then multiplied by the ratio to them."""
    bound: float = math.inf
    """Maximum log-ratio of policy to sampler, in nats, where the sampler's log-probs are the old ones."""


class BranchPenalty:
    """Replaces the number `beta` in TRL's `_compute_loss` for one micro-batch.

    TRL uses that number in only two ways (pinned in `tests/upstream`): `beta != 0.0`, and `beta * per_token_kl` when
    adding the KL to the per-token loss. Here the product is the sum over branches b of beta_b * penalty_b, shape
    (B, T). The rest of the loss is TRL's. The policy's log-probs come from TRL's single forward pass, via
    `record_logps`.

    With `off_policy`, an earlier policy generated the completions. The penalty is then also multiplied by the ratio of
    the policy at the start of the step to that sampler: TRL's `importance_sampling_ratio`, bounded as in the loss.

    `inputs` is TRL's micro-batch, with `branch_ids` of shape (B,). `shares` holds the weight of each branch's rewards,
    by branch id; it multiplies the advantages, to which all of TRL's policy losses are proportional.
    """

    def __init__(
        self, inputs: MicroBatch, betas: Sequence[float], settings: PenaltySettings, shares: Sequence[float] = ()
    ) -> None:
        self._settings = settings
        self._branch_ids = inputs["branch_ids"]  # (B,)
        self._branches = len(betas)
        self._mask = loss_mask(inputs)  # (B, T)
        # non-blocking: a blocking copy would wait for the last micro-batch's whole backward pass
        by_branch = torch.tensor(betas).to(self._branch_ids.device, non_blocking=True)
        self._betas = by_branch[self._branch_ids].unsqueeze(1)  # (B, 1)
        self.inputs = {
            name: bounded(value, self._mask) if name in _LOGPS and value is not None else value
            for name, value in inputs.items()
        }
        """The micro-batch, with finite log-probs for counted tokens and 0 elsewhere."""
        if any(share != 1 for share in shares):
            advantages = inputs["advantages"]  # (B,) or (B, T)
            by_branch = torch.tensor(shares).to(advantages, non_blocking=True)[self._branch_ids]  # (B,)
            self.inputs["advantages"] = advantages * by_branch.view(-1, *[1] * (advantages.dim() - 1))
        self._logps: torch.Tensor | None = None
        self._log_ratio = self._penalty = self._weight = torch.empty(0)

    def record_logps(self, per_token_logps: torch.Tensor) -> torch.Tensor:
        """Store the policy's log-probs, shape (B, T). Returns them `bounded`, for the loss."""
        self._logps = bounded(per_token_logps, self._mask)
        return self._logps

    def __ne__(self, other: object) -> bool:
        """`beta != 0.0`: always true."""
        return True

    def __mul__(self, per_token_kl: torch.Tensor) -> torch.Tensor:
        """`beta * per_token_kl`: the branches' penalty, 0 for excluded tokens. Shape (B, T)."""
        if self._logps is None:
            raise RuntimeError("the penalty was used before `record_logps` received the policy's log-probs")
        settings, logps = self._settings, self._logps.to(torch.promote_types(self._logps.dtype, torch.float32))
        self._log_ratio = self.inputs["ref_per_token_logps"] - logps
        importance = log_importance(logps, self.inputs.get("old_per_token_logps"), self._mask, settings.level)
        # less a constant, so that the gradient stays -x * ratio
        importance = importance - (importance.detach() - settings.bound).clamp(min=0)
        ratio = importance if settings.bias_correction else None
        self._penalty = penalty(self._log_ratio, ratio, settings.estimator, settings.clamp)
        self._weight = torch.ones_like(logps)
        if settings.off_policy:  # without `importance_sampling_ratio`, the old log-probs are the sampler's
            limit = settings.clamp or torch.inf
            own = torch.exp(importance.detach().clamp(-limit, limit))  # (B, T) or (B, 1)
            stale = self.inputs.get("importance_sampling_ratio", 1.0)  # (B, T), or (B, 1) for whole completions
            self._penalty = self._penalty * stale * (1.0 if settings.bias_correction else own)
            self._weight = self._weight * stale * own
        return torch.where(self._mask, self._betas * self._penalty, 0.0)

    def sums(self) -> torch.Tensor:
        """Each branch's measured sums, without gradients: shape (branches, 5), float64. Columns, as in `SUMS`:

        - the KL by k1, regardless of the loss, and the penalty without its coefficient, both in nats;
        - the number of tokens with a log-ratio beyond the clamp, and of all tokens;
        - the tokens' weights, by which both sums are divided. A weight is 1 on-policy, otherwise the ratio to the
          sampler, and 0 for tokens masked by TRL's correction.
        """
        log_ratio, clamp = self._log_ratio.detach(), self._settings.clamp
        clamped = log_ratio.abs() > (clamp or torch.inf)
        ones = torch.ones_like(log_ratio)
        k1 = self._weight * estimate(log_ratio, "k1")
        per_token = torch.stack([k1, self._penalty.detach(), clamped.to(ones.dtype), ones, self._weight])
        counted = torch.where(self._mask, per_token, 0)  # (len(SUMS), B, T)
        per_sample = counted.sum(dim=2, dtype=torch.float64)  # (len(SUMS), B)
        totals = per_sample.new_zeros(len(SUMS), self._branches)
        return totals.index_add_(1, self._branch_ids, per_sample).T.contiguous()  # NCCL requires contiguous tensors


def loss_mask(inputs: MicroBatch) -> torch.Tensor:
    """The tokens that count: completion tokens generated by the policy itself. Shape (B, T), bool."""
    mask: torch.Tensor = inputs["completion_mask"]
    return mask.bool() if "tool_mask" not in inputs else mask.bool() & inputs["tool_mask"].bool()


def bounded(per_token_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Clip log-probs to at least `LEAST_LOGP`, and set excluded tokens to 0. NaN for a counted token stays NaN: a
    broken policy or reference must not look healthy."""
    return torch.where(mask, per_token_logps, 0.0).clamp(min=LEAST_LOGP)


def log_importance(
    per_token_logps: torch.Tensor, old_per_token_logps: torch.Tensor | None, mask: torch.Tensor, level: str
) -> torch.Tensor:
    """Log of TRL's importance ratio, (B, T), or (B, 1) for the `level` `sequence`. Only the policy receives gradients.
    Without `old_per_token_logps`, the policy's own log-probs are used."""
    old = per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps
    log_ratio = per_token_logps - old
    if level == "token":
        return log_ratio
    return (log_ratio * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
