"""Estimates of the KL divergence between policy and reference from single tokens, and their penalty in a loss.

Pure functions of tensors. With x = log pi_ref(token) - log pi(token) of a token that pi sampled
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

import torch

ESTIMATORS = ("k1", "k2", "k3")
LARGEST_CLAMP = 40.0  # in nats. The ratio times k3 grows as e^(2 * clamp), which overflows float32 above 44.


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
