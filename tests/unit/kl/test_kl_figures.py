"""From one optimizer step's sums to the KL's figures."""

import math

import pytest

from salesrl_trl.kl.controller import KLControl, WindowSettings
from salesrl_trl.kl.kl_figures import add_kl, kl_names
from salesrl_trl.kl.law import KLTarget
from salesrl_trl.telemetry.aggregates import StepAggregates

BRANCHES = ("fairness", "hallucination")


def test_a_band_is_drawn_where_there_is_a_kl_and_nowhere_else():
    """TensorBoard draws a band over equal steps alone."""
    targets = {"fairness": KLTarget(beta=0.1, low=0.02, high=0.06), "hallucination": KLTarget(beta=0.1)}
    control, means = KLControl(targets, None, WindowSettings()), StepAggregates(kl_names(BRANCHES))
    # ten tokens each; the second branch's weigh 5 together, by the ratio to the policy that sampled them
    add_kl(means, [[0.3, 0.2, 1.0, 10.0, 10.0], [0.3, 0.2, 1.0, 10.0, 5.0]], [0.1, 0.1], [1.0, 0.5], control)
    flushed = means.flush()
    assert flushed["kl/fairness"] == 0.03
    assert (flushed["kl/hallucination"], flushed["kl/hallucination_k1"]) == (0.06, 0.04)
    assert (flushed["kl/hallucination_clamped"], flushed["kl/hallucination_tokens"]) == (0.1, 10)
    assert flushed["kl"] == pytest.approx(0.6 / 15)
    assert (flushed["kl/fairness_low"], flushed["kl/fairness_high"]) == (0.02, 0.06)
    assert math.isnan(flushed["kl/hallucination_low"])  # it has none
    assert (flushed["kl/fairness_update_share"], flushed["kl/hallucination_update_share"]) == (1.0, 0.5)
    add_kl(means, [[0.0] * 5, [0.3, 0.2, 0.0, 10.0, 10.0]], [0.1, 0.1], [1.0, 0.5], control)  # no row of fairness
    flushed = means.flush()
    assert all(math.isnan(flushed[f"kl/fairness{edge}"]) for edge in ("", "_low", "_high"))
