"""What rollouts of an earlier policy do to the KL of the policy: expectations over a vocabulary, taken exactly."""

import pytest
import torch

from salesrl_trl.kl.penalty import BranchPenalty, PenaltySettings

TOKENS = 4000
"""Completions of one token each. The sampler's probabilities are counts of them, so that sums are expectations."""


def distributions(kl_of_policy_to_sampler, seed):
    """Log-probs of policy, reference and sampler over 16 tokens, shape (16,), float64; and the sampler's counts."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda: torch.randn(16, generator=generator, dtype=torch.float64)  # noqa: E731
    base = normal()
    counts = (base.softmax(0) * TOKENS).round().clamp(min=1)
    counts[counts.argmax()] += TOKENS - counts.sum()
    sampler = (counts / TOKENS).log()
    reference = (sampler + 0.5 * normal()).log_softmax(0)
    away, low, high = normal(), 0.0, 10.0
    for _ in range(60):  # the step away from the sampler with this KL
        step = (low + high) / 2
        policy = (sampler + step * away).log_softmax(0)
        far = (policy.exp() * (policy - sampler)).sum() > kl_of_policy_to_sampler
        low, high = (low, step) if far else (step, high)
    return policy, reference, sampler, counts.long()


def measure(policy, reference, sampler, counts, settings, engine):
    """The penalty's expected gradient by the policy's logits, shape (16,), and the two measured KLs."""
    logits = policy.clone().requires_grad_()
    tokens = torch.arange(16).repeat_interleave(counts)  # (TOKENS,)
    pick = lambda logps: logps[tokens].unsqueeze(1)  # noqa: E731
    inputs = {
        "completion_mask": torch.ones(TOKENS, 1),
        "branch_ids": torch.zeros(TOKENS, dtype=torch.long),
        "ref_per_token_logps": pick(reference),
        # with weights beside the ratio, the old policy is that of the start of the step, otherwise the sampler
        "old_per_token_logps": pick(policy if engine == "vllm" else sampler),
    }
    if engine != "transformers":
        weights = (policy - sampler).exp() if engine == "vllm" else torch.ones_like(policy)
        inputs["importance_sampling_ratio"] = pick(weights)
    penalty = BranchPenalty(inputs, (1.0,), settings)
    term = penalty * penalty.record_logps(pick(logits.log_softmax(0)))
    term.mean().backward()
    k1, kl, _, _, weight = penalty.sums()[0].tolist()
    return logits.grad, kl / weight, k1 / weight


def exact(policy, reference):
    """Gradient of KL(policy || reference) by the policy's logits, and the KL."""
    logits = policy.clone().requires_grad_()
    logps = logits.log_softmax(0)
    kl = (logps.exp() * (logps - reference)).sum()
    kl.backward()
    return logits.grad, kl.item()


def relative_error(gradient, true):
    return ((gradient - true).norm() / true.norm()).item()


# k2's gradient is the KL's without the correction, that of the others with it
@pytest.mark.parametrize(("estimator", "correction"), [("k1", True), ("k3", True), ("k2", False)])
@pytest.mark.parametrize("staleness", [0.0015, 0.006])
@pytest.mark.parametrize("engine", ["vllm", "vllm bypass", "transformers"])
def test_gradient_and_measured_kl_are_those_of_the_policy_whoever_sampled(estimator, correction, staleness, engine):
    errors, uncorrected = [], []
    for seed in range(5):
        policy, reference, sampler, counts = distributions(staleness, seed)
        true_gradient, true_kl = exact(policy, reference)
        both = {}
        for off_policy in (False, True):
            settings = PenaltySettings(estimator=estimator, bias_correction=correction, off_policy=off_policy)
            gradient, kl, k1 = measure(policy, reference, sampler, counts, settings, engine)
            both[off_policy] = relative_error(gradient, true_gradient)
        errors.append(both[True])
        uncorrected.append(both[False])
        assert k1 == pytest.approx(true_kl, rel=1e-9)  # the sum over the sampler's tokens, weighed: an identity
        if estimator == "k3":
            assert kl == pytest.approx(true_kl, rel=1e-9)
    assert max(errors) < 1e-9
    if engine == "vllm" or not correction:  # otherwise the loss's own ratio is to the sampler, if the KL has it
        assert min(uncorrected) > 0.01
