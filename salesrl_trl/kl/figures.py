"""The KL's figures in a log line.

Owns their names in full and the way from one optimizer step's sums to them.
"""

import math
from collections.abc import Sequence

from salesrl_trl.kl.controller import KLControl
from salesrl_trl.names import ALL_KL, beta_of, kl_of
from salesrl_trl.telemetry.aggregates import StepAggregates

KINDS = ("", "_k1", "_in_band", "_share_in_band", "_clamped", "_tokens", "_low", "_high", "_update_share")
"""Figures of each branch, as `kl_of` takes them:

- the KL as the loss estimates it, and by the k1 estimator;
- whether the step's KL lay in the band, and the share of the run's steps for which this is true;
- the share of tokens with a clamped log-ratio;
- tokens per optimizer step;
- the band's two edges;
- by how much the branch's rewards count in the update: 1, unless the last resort acts (`KLTarget.least_share`).
"""


def kl_names(branches: Sequence[str]) -> tuple[str, ...]:
    """Every name of `add_kl`. `ALL_KL` is first: one token far off makes TRL's own figure infinite."""
    return (ALL_KL, *(name for b in branches for name in (beta_of(b), *(kl_of(b, kind) for kind in KINDS))))


def add_kl(
    aggregates: StepAggregates,
    totals: Sequence[Sequence[float]],
    betas: Sequence[float],
    shares: Sequence[float],
    control: KLControl,
) -> None:
    """Add one optimizer step's KL.

    `aggregates`: made with `kl_names`. `totals`: by branch id, then by `kl.penalty.SUMS`, over all ranks. `betas`:
    Coefficients in the loss of this step, by branch id. `shares`: by how much the branches' rewards counted in it, by
    branch id. `control`: bands, and the shares of steps in them.
    """
    for branch, beta, share, sums in zip(control.branches, betas, shares, totals, strict=True):
        kl, k1, clamped, tokens, weight = sums
        name, target = branch.branch, branch.target
        aggregates.add(beta_of(name), beta, 1)
        aggregates.add(kl_of(name, "_tokens"), tokens, 1)
        aggregates.add(kl_of(name, "_update_share"), share, 1)
        aggregates.add(ALL_KL, kl, weight)
        for kind, total, count in (("", kl, weight), ("_k1", k1, weight), ("_clamped", clamped, tokens)):
            aggregates.add(kl_of(name, kind), total, count)
        if target.has_band and weight and math.isfinite(kl):
            # A step without a KL has no edges either: TensorBoard draws a band only over steps that all lines share.
            for kind, nats in (("_low", target.low), ("_high", target.high)):
                aggregates.add(kl_of(name, kind), nats or 0.0, 1)
            aggregates.add(kl_of(name, "_in_band"), float(target.contains(kl / weight)), 1)
        if not math.isnan(branch.share_in_band):
            aggregates.add(kl_of(name, "_share_in_band"), branch.share_in_band, 1)
