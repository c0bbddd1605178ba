"""The KL's figures in a log line.

Owns the way from one optimizer step's sums to them. `names.FIGURES` has their names; `update.ledger` adds them.
"""

import math
from collections.abc import Sequence

from salesrl_trl.kl.controller import KLControl
from salesrl_trl.names import ALL_KL, beta_of, kl_of, line_names
from salesrl_trl.telemetry.aggregates import StepAggregates


def kl_names(branches: Sequence[str]) -> tuple[str, ...]:
    """Every name of `add_kl`. `ALL_KL` replaces TRL's own figure, which one token far off makes infinite."""
    return line_names({"kl"}, {"branch": branches})


def add_kl(
    aggregates: StepAggregates,
    totals: Sequence[Sequence[float]],
    betas: Sequence[float],
    shares: Sequence[float],
    control: KLControl,
) -> None:
    """Add one optimizer step's KL to aggregates that were made with `kl_names`.

    `totals` are over all ranks, by branch id, then by `kl.penalty.SUMS`. `betas` are the coefficients in the loss of
    this step, and `shares` say by how much the branches' rewards counted in it, both by branch id. `control` has the
    bands, and the shares of steps in them.
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
