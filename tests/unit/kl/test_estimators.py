"""The estimators and what a coefficient multiplies, by hand.

With p the policy's log-prob, x = ref - p, so that d/dp = -d/dx: a gradient below 0 raises p.
"""

import math

import pytest
import torch

from salesrl_trl.kl.penalty import penalty

CLAMP = 10.0
E10 = math.exp(10)  # 22026.4658
LN2 = math.log(2)
BEYOND = (11.0, 500.0, -11.0, -500.0)


def tensor(*values, dtype=torch.float64):
    return torch.tensor([values], dtype=dtype)  # (1, T)


def slope(x, estimator, log_ratio_to_old=None, clamp=CLAMP, level="token", dtype=torch.float64):
    """Value and d/dp of the penalty of one token: `log_ratio_to_old` is p - old, None for no importance ratio."""
    policy = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    importance = None
    if log_ratio_to_old is not None:
        importance = policy + log_ratio_to_old
        importance = importance.mean(dim=1, keepdim=True) if level == "sequence" else importance
    value = penalty(x - policy, importance, estimator, clamp)
    value.sum().backward()
    return value.item(), policy.grad.item()


@pytest.mark.parametrize(
    ("estimator", "corrected", "expected"),
    [
        # Over a softmax of two logits the gradient by the first is sum_i pi_i g_i (1[i = 1] - 3/4) with g the
        # gradient by log pi_i: 3/16 x (g_1 - g_2).
        # KL's: g = -x, so 3/16 x (0.4054651 + 0.6931472) = 0.2059898
        ("k1", True, 0.2059898),
        ("k3", True, 0.2059898),
        ("k2", False, 0.2059898),
        # g = 1 for every token
        ("k1", False, 0.0),
        # g = 1 - e^x = 1/3 and -1: 3/16 x 4/3, the gradient of the KL of the other direction (3/4 - 1/2)
        ("k3", False, 0.25),
        # g = x^2 / 2 - x = 0.0822010 + 0.4054651 and 0.2402265 - 0.6931472: 3/16 x 0.9405868
        ("k2", True, 0.1763600),
    ],
    ids=["k1 corrected", "k3 corrected", "k2", "k1", "k3", "k2 corrected"],
)
def test_the_average_gradient_is_the_kls_where_the_docstring_says_so(estimator, corrected, expected):
    logits = tensor(math.log(3), 0.0).requires_grad_()
    logps = logits.log_softmax(dim=1)  # of 3/4 and 1/4
    importance = logps - logps.detach() if corrected else None
    value = penalty(math.log(0.5) - logps, importance, estimator, CLAMP)
    (logps.detach().exp() * value).sum().backward()
    assert logits.grad[0].tolist() == pytest.approx([expected, -expected], abs=1e-6)


@pytest.mark.parametrize("importance", [None, (4, 6), (4, 1)], ids=["no ratio", "tokens", "sequences"])
def test_a_clamp_of_0_is_trls_formula_bit_by_bit(importance):
    generator = torch.Generator().manual_seed(1)
    x = 20 * torch.randn(4, 6, generator=generator)
    weights = None if importance is None else torch.randn(importance, generator=generator)
    value = torch.exp(x) - x - 1
    assert torch.equal(penalty(x, weights, "k3", 0), value if weights is None else value * torch.exp(weights))


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize(
    ("x", "estimator", "value"),
    [
        (11.0, "k3", 44040.93159),  # e^10 - 11 + (e^10 - 1)
        (-500.0, "k3", 498.97779943),  # e^-10 + 9 + 490 (1 - e^-10) = 499 - 489 x 0.0000453999
        (11.0, "k2", 60.0),  # 50 + 10
        (-500.0, "k1", 500.0),  # 10 + 490
    ],
)
def test_beyond_the_clamp_the_value_goes_on_as_a_straight_line(x, estimator, value, corrected):
    """With a ratio in front, here 2, the value is twice that; only its gradient is another."""
    seen, _ = slope(x, estimator, LN2 if corrected else None)
    assert seen == pytest.approx(value * (2 if corrected else 1), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("estimator", "ratio", "upper", "lower"),
    [
        # d/dp k3 = 1 - e^x, d/dp k2 = -x, d/dp k1 = 1
        ("k3", None, 1 - E10, 1 - 1 / E10),
        ("k2", None, -10.0, 10.0),
        ("k1", None, 1.0, 1.0),
        # d/dp (ratio x k3) = ratio x (k3 + 1 - e^x) = -ratio x x
        ("k3", LN2, -20.0, 20.0),
    ],
    ids=["k3", "k2", "k1", "k3 at ratio 2"],
)
def test_the_gradient_is_continuous_at_the_clamp(estimator, ratio, upper, lower):
    for edge, expected in ((CLAMP, upper), (-CLAMP, lower)):
        for factor in (1 - 1e-9, 1.0, 1 + 1e-9):
            assert slope(edge * factor, estimator, ratio)[1] == pytest.approx(expected, rel=1e-6), factor


@pytest.mark.parametrize("x", BEYOND)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(
    ("estimator", "ratio", "level", "upper", "lower"),
    [
        # the estimate's own slope at the clamp
        ("k3", None, "token", 1 - E10, 1 - 1 / E10),
        ("k2", None, "token", -10.0, 10.0),
        # the clamp, times the ratio
        ("k3", LN2, "token", -20.0, 20.0),
        ("k3", 500.0, "token", -10 * E10, 10 * E10),  # the ratio is e^10 at most
        ("k3", -500.0, "token", -10 / E10, 10 / E10),  # and e^-10 at least
        ("k3", 500.0, "sequence", -10 * E10, 10 * E10),
        ("k2", 0.0, "sequence", -10.0, 10.0),
        ("k1", 0.0, "token", -10.0, 10.0),
    ],
)
def test_beyond_the_clamp_the_gradient_pulls_the_policy_back(x, dtype, estimator, ratio, level, upper, lower):
    value, gradient = slope(x, estimator, ratio, level=level, dtype=dtype)
    assert math.isfinite(value)
    # x > 0: the reference likes the token better, so p must rise, for which descent needs a gradient below 0
    assert math.copysign(1, gradient) == -math.copysign(1, x)
    assert gradient == pytest.approx(upper if x > 0 else lower, rel=1e-5)


@pytest.mark.parametrize("x", [3.0, -3.0])
@pytest.mark.parametrize("ratio", [10.5, -500.0])
def test_an_importance_ratio_beyond_the_clamp_weighs_but_is_no_longer_steered(x, ratio):
    value, gradient = slope(x, "k3", ratio, dtype=torch.float32)
    weight = E10 if ratio > 0 else 1 / E10
    # e^3 - 4 = 16.0855369 and e^-3 + 2 = 2.0497871; of the gradient k3's own remains, 1 - e^x
    assert value == pytest.approx(weight * {3.0: 16.0855369, -3.0: 2.0497871}[x], rel=1e-5)
    assert gradient == pytest.approx(weight * (1 - math.exp(x)), rel=1e-5)
