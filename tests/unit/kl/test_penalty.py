"""The object that stands where TRL has `beta`: what it adds to the loss, and what it measures."""

import math

import pytest
import torch

from salesrl_trl.kl.penalty import ESTIMATORS, SUMS, BranchPenalty, PenaltySettings, loss_mask

INF, NAN = math.inf, math.nan
LN2 = math.log(2)
LEVELS = ("token", "sequence")
PLAIN = PenaltySettings(bias_correction=False)
MASK = ((1, 1, 1, 0), (1, 1, 0, 0))


def batch(ref, *, old=None, mask=MASK, branches=(0, 1), dtype=torch.float32, **more):
    """TRL's micro-batch, as far as the penalty reads it. Log-probs have shape (B, T), and so has the mask."""
    inputs = {
        "completion_mask": torch.tensor(mask),
        "branch_ids": torch.tensor(branches),
        "ref_per_token_logps": torch.as_tensor(ref, dtype=dtype),
        "advantages": torch.zeros(len(branches)),
        **more,
    }
    if old is not None:
        inputs["old_per_token_logps"] = torch.as_tensor(old, dtype=dtype)
    return inputs


def penalise(policy, inputs, betas=(1.0, 1.0), settings=PLAIN):
    """What TRL adds to the per-token loss, the policy's gradient of its sum over counted tokens, and the penalty."""
    penalty = BranchPenalty(inputs, betas, settings)
    dtype = inputs["ref_per_token_logps"].dtype
    policy = torch.as_tensor(policy, dtype=dtype).clone().requires_grad_()
    term = penalty * torch.zeros_like(penalty.record_logps(policy))
    (term * loss_mask(inputs)).sum().backward()  # as TRL does: NaN x 0 would be NaN
    return term.detach(), policy.grad, penalty


def full(value):
    return torch.full((2, 4), value)


def test_a_branch_with_a_coefficient_of_0_has_no_penalty_beside_one_that_has():
    term, gradient, _ = penalise(full(-3.0), batch(full(-2.0)), betas=(0.0, 1.0))
    # e - 2 = 0.7182818, and its gradient 1 - e
    assert term.tolist()[0] == [0.0] * 4
    assert term.tolist()[1] == pytest.approx([0.7182818, 0.7182818, 0, 0], abs=1e-6)
    assert gradient.tolist()[0] == [0.0] * 4
    assert gradient.tolist()[1] == pytest.approx([-1.7182818, -1.7182818, 0, 0], abs=1e-6)


def test_trls_own_kl_is_replaced_and_takes_no_gradient():
    penalty = BranchPenalty(batch(full(-2.0)), (1.0, 1.0), PLAIN)
    assert penalty != 0.0  # whatever the coefficients
    policy = full(-3.0).requires_grad_()
    penalty.record_logps(policy)
    theirs = full(INF).requires_grad_()
    term = penalty * theirs
    term.sum().backward()
    assert term.isfinite().all()
    assert theirs.grad is None
    assert policy.grad is not None


def test_the_inputs_are_bounded_copies_and_all_else_is_handed_on():
    old, ref, sampling = full(-INF), full(NAN), full(-2.0)
    inputs = batch(ref, old=old, sampling_per_token_logps=sampling, pixel_values=None)
    penalty = BranchPenalty(inputs, (1.0, 1.0), PLAIN)
    given = penalty.inputs
    assert given.keys() == inputs.keys()
    assert given["advantages"] is inputs["advantages"]
    assert given["completion_mask"] is inputs["completion_mask"]
    assert given["pixel_values"] is None
    assert given["old_per_token_logps"].tolist() == [[-1000.0] * 3 + [0.0], [-1000.0] * 2 + [0.0] * 2]
    assert given["sampling_per_token_logps"].tolist() == [[-2.0] * 3 + [0.0], [-2.0] * 2 + [0.0] * 2]
    assert given["ref_per_token_logps"].isnan().tolist() == [[True] * 3 + [False], [True] * 2 + [False] * 2]
    assert torch.equal(inputs["old_per_token_logps"], full(-INF))  # the buffered batch is used again


@pytest.mark.parametrize(
    ("advantages", "expected"),
    [((1.0, -4.0), [1.0, -1.0]), (((1.0, 2.0), (-4.0, 0.0)), [[1.0, 2.0], [-1.0, 0.0]])],
    ids=["of completions", "of tokens"],
)
def test_a_branchs_rewards_count_by_its_share(advantages, expected):
    inputs = batch(full(-2.0), advantages=torch.tensor(advantages))
    penalty = BranchPenalty(inputs, (1.0, 1.0), PLAIN, (1.0, 0.25))
    assert penalty.inputs["advantages"].tolist() == expected
    assert inputs["advantages"].tolist() == torch.tensor(advantages).tolist()


EXTREMES = {
    # name: policy, reference, old, each of one token
    "far above the reference": (-1.0, -501.0, -1.0),
    "far below the reference": (-501.0, -1.0, -501.0),
    "no log-prob in the policy": (-INF, -1.0, -1.0),
    "no log-prob in the reference": (-1.0, -INF, -1.0),
    "no log-prob when it was sampled": (-1.0, -2.0, -INF),
    "no log-prob anywhere": (-INF, -INF, -INF),
    "ratio far above 1": (-1.0, -2.0, -501.0),
    "ratio far below 1": (-501.0, -502.0, -1.0),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("correction", [True, False], ids=["corrected", "plain"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("token", EXTREMES.values(), ids=EXTREMES)
def test_the_loss_and_its_gradient_are_finite_at_extremes(token, estimator, correction, level):
    policy, ref, old = (full(-1.5) for _ in range(3))
    for logps, value in zip((policy, ref, old), token, strict=True):
        logps[0, 1] = value
    settings = PenaltySettings(estimator=estimator, bias_correction=correction, level=level)
    term, gradient, penalty = penalise(policy, batch(ref, old=old), settings=settings)
    assert term.isfinite().all()
    assert gradient.isfinite().all()
    assert penalty.sums().isfinite().all()


@pytest.mark.parametrize("junk", [NAN, 500.0])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("where", range(3), ids=["policy", "reference", "old"])
def test_whatever_stands_in_the_padding_contributes_exactly_0(where, level, junk):
    policy, ref, old = logps = [full(value) for value in (-2.0, -1.0, -2.5)]
    logps[where][~torch.tensor(MASK).bool()] = junk
    settings = PenaltySettings(level=level)
    term, gradient, penalty = penalise(policy, batch(ref, old=old), settings=settings)
    outside = ~torch.tensor(MASK).bool()
    assert (term[outside] == 0).all()
    assert (gradient[outside] == 0).all()
    clean_term, clean_gradient, clean = penalise(full(-2.0), batch(full(-1.0), old=full(-2.5)), settings=settings)
    assert torch.equal(term, clean_term)
    assert torch.equal(gradient, clean_gradient)
    assert torch.equal(penalty.sums(), clean.sums())


@pytest.mark.parametrize("clamp", [10.0, 0.0], ids=["clamped", "not clamped"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("broken", ["policy", "reference", "old"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_nan_where_a_token_counts_is_not_hidden(estimator, broken, level, clamp):
    logps = {name: full(-1.5) for name in ("policy", "reference", "old")}
    logps[broken][0, 1] = NAN
    settings = PenaltySettings(estimator=estimator, level=level, clamp=clamp)
    term, _, penalty = penalise(logps["policy"], batch(logps["reference"], old=logps["old"]), settings=settings)
    assert term[0, 1].isnan()
    kl = penalty.sums()[:, SUMS.index("penalty")]
    assert kl.isnan().tolist() == [True, False]  # of its own branch


def test_the_sums_by_hand():
    # x = ref - policy; samples 0 and 3 are of branch 0, 1 and 2 of branch 1, none of branch 2
    x = torch.tensor([[LN2, -LN2, 11.0], [LN2, 0.0, 77.0], [-12.0, 77.0, 77.0], [LN2, 10.0, -10.0]])
    mask = ((1, 1, 1), (1, 1, 0), (1, 0, 0), (1, 1, 1))
    inputs = batch(x - 20, mask=mask, branches=(0, 1, 1, 0))
    _, _, penalty = penalise(torch.full((4, 3), -20.0), inputs, betas=(0.5, 7.0, 2.0))
    k1, kl, clamped, tokens, weight = penalty.sums().unbind(dim=1)
    assert penalty.sums().dtype == torch.float64
    # branch 0: 0.3068528 (of ln 2) + 0.1931472 (-ln 2) + 44040.93159 (11)
    #           + 0.3068528 (ln 2) + 22015.46579 (10) + 9.0000454 (-10)
    # branch 1: 0.3068528 + 0 + 11 - e^-10 (-12: e^-10 + 9 + 2 (1 - e^-10)), whatever the coefficients
    assert kl.tolist() == pytest.approx([66066.20428, 11.3068074, 0.0], rel=1e-6)
    # branch 0: -(ln 2 - ln 2 + 11 + ln 2 + 10 - 10); branch 1: -(ln 2 + 0 - 12); k1 is not clamped
    assert k1.tolist() == pytest.approx([-11.6931472, 11.3068528, 0.0], rel=1e-6)
    assert clamped.tolist() == [1, 1, 0]  # 11; -12; at the clamp is not beyond it
    assert tokens.tolist() == weight.tolist() == [6, 3, 0]
    assert (penalty.sums() + penalty.sums()).is_contiguous()  # over micro-batches; NCCL reduces no other


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("correction", [True, False], ids=["corrected", "plain"])
def test_where_no_token_counts_the_penalty_is_0_and_still_on_the_graph(correction, level):
    inputs = batch(full(NAN), old=full(NAN), mask=((0,) * 4,) * 2)
    penalty = BranchPenalty(inputs, (1.0, 1.0), PenaltySettings(bias_correction=correction, level=level))
    policy = full(-3.0).requires_grad_()
    term = penalty * penalty.record_logps(policy)
    assert term.requires_grad
    term.sum().backward()
    assert (term == 0).all()
    assert (policy.grad == 0).all()
    assert penalty.sums().tolist() == [[0.0] * 5] * 2


def test_the_ratio_to_the_sampler_by_hand():
    # k3 at ln 2 is 1 - ln 2 = 0.3068528; ratios 2, 1/2, 0 (left out) and, of the second completion as a whole, 3
    ratio = torch.tensor([[2.0, 0.5, 0.0, 9.0], [3.0, 3.0, 9.0, 9.0]])
    inputs = batch(full(LN2 - 3), old=full(-3.0), importance_sampling_ratio=ratio)
    settings = PenaltySettings(off_policy=True)
    term, _, penalty = penalise(full(-3.0), inputs, betas=(1.0, 1.0), settings=settings)
    assert term[0].tolist() == pytest.approx([0.6137056, 0.1534264, 0.0, 0.0], abs=1e-6)
    k1, kl, clamped, tokens, weight = penalty.sums().unbind(dim=1)
    assert kl.tolist() == pytest.approx([0.7671320, 1.8411169], abs=1e-6)
    assert k1.tolist() == pytest.approx([-2.5 * LN2, -6 * LN2], abs=1e-6)
    assert weight.tolist() == [2.5, 6.0]  # what both are divided by: each branch's KL is 0.3068528
    assert tokens.tolist() == [3, 2]
    assert clamped.tolist() == [0, 0]
    by_completion = {**inputs, "importance_sampling_ratio": torch.tensor([[1.0], [3.0]])}
    term, _, _ = penalise(full(-3.0), by_completion, betas=(1.0, 1.0), settings=settings)
    assert term[1].tolist() == pytest.approx([0.9205585, 0.9205585, 0.0, 0.0], abs=1e-6)
    on_policy, _, _ = penalise(full(-3.0), inputs, betas=(1.0, 1.0), settings=PenaltySettings())
    assert on_policy[0].tolist() == pytest.approx([0.3068528] * 3 + [0.0], abs=1e-6)  # TRL's own: no such ratio


def test_a_ratio_to_the_sampler_in_the_loss_itself_is_bounded_too():
    """Old log-probs of the sampler, 4 nats below the policy's: as if it were weighed by 3 at its first update."""
    inputs = batch(full(LN2 - 3), old=full(-7.0), importance_sampling_ratio=torch.ones(2, 1))
    for bias_correction in (True, False):
        settings = PenaltySettings(off_policy=True, bound=math.log(3.0), bias_correction=bias_correction)
        term, gradient, penalty = penalise(full(-3.0), inputs, betas=(1.0, 1.0), settings=settings)
        assert term[0, 0].item() == pytest.approx(3 * 0.3068528, abs=1e-6)
        # with the ratio -x, as within the bound; without it k3's own, 1 - e^x
        assert gradient[0, 0].item() == pytest.approx(3 * (-LN2 if bias_correction else 1 - 2), abs=1e-5)
        stale = {**inputs, "old_per_token_logps": full(-3.0), "importance_sampling_ratio": torch.full((2, 1), 3.0)}
        _, weighed, _ = penalise(full(-3.0), stale, betas=(1.0, 1.0), settings=settings)
        assert gradient[0].tolist() == pytest.approx(weighed[0].tolist(), abs=1e-5)
        assert penalty.sums()[0, 4].item() == pytest.approx(3 * penalty.sums()[0, 3].item())


def test_half_precision_log_probs_are_subtracted_in_float32():
    # Neighbours in bfloat16: x = -2^-7. k3 = x^2 / 2 + x^3 / 6 + ... = 0.00003051758 - 0.00000007947 = 0.0000304381;
    # in bfloat16, e^x - x - 1 would be 127/128 + 1/128 - 1 = 0.
    inputs = batch(full(-1.0078125), dtype=torch.bfloat16)
    term, gradient, penalty = penalise(full(-1.0), inputs)
    assert inputs["ref_per_token_logps"].dtype == gradient.dtype == torch.bfloat16
    assert term.dtype == torch.float32
    # float32 keeps 6 x 10^-8 of the 1 that e^x is near
    assert term[0, 0].item() == pytest.approx(3.04381e-5, abs=1.2e-7)
    assert gradient[0, 0].item() == pytest.approx(0.0077821, rel=2**-8)  # 1 - e^x, rounded to bfloat16
    assert penalty.sums()[1].tolist() == pytest.approx([2 / 128, 2 * 3.04381e-5, 0, 2, 2], abs=2.4e-7)
