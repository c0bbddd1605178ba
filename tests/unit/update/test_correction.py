"""The correction of the sampler's mismatch: by hand, against verl's function, and its gradient in TRL's loss."""

import ast
import contextlib
import functools
import importlib.util
import inspect
import json
import math
import os
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support.ranks import of_one_machine, run_ranks

from salesrl_trl.errors import ConfigError
from salesrl_trl.kl.penalty import FAILED
from salesrl_trl.names import EFFECTIVE_SAMPLES, LEFT_OUT, SAMPLER_KL, SAMPLER_KL_K3
from salesrl_trl.update.correction import (
    OLD,
    RATIO,
    REJECTIONS,
    SAMPLED,
    CorrectionAtStep,
    CorrectionSettings,
    SamplerCorrection,
    bounds_of,
    importance_ratio,
    log_ratio,
    within,
)

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LOG2 = math.log(2)


class Noted:
    """A ledger that keeps what is added."""

    def __init__(self):
        self.found = {}

    def add(self, mode, name, total, count=1):
        assert (mode, name) not in self.found
        self.found[mode, name] = (total, count)

    def mean(self, name, mode="train"):
        total, count = self.found[mode, name]
        return total / count


def settings(mode="token_truncate", low=None, high=3.0, weights="bounded", **reject):
    bounds = {name: bounds_of(name, threshold) for name, threshold in reject.items()}
    return CorrectionSettings(mode=mode, low=low, high=high, weights=weights, reject=bounds)


def micro_batch(x, mask=None):
    """A micro-batch whose policy has log-probs of -1, and whose sampler differs from it by x."""
    x = torch.tensor(x, dtype=torch.float64)
    logps = torch.full_like(x, -1.0)
    mask = torch.ones_like(x) if mask is None else torch.tensor(mask)
    return {"completion_mask": mask.long(), SAMPLED: logps - x}, logps


def weights_at_step(given, x, mask=None):
    inputs, logps = micro_batch(x, mask)
    CorrectionAtStep(given, Noted()).apply(inputs, logps)
    return inputs[RATIO].tolist()


# e^x is 2, 1, 1/4 and, of the second completion, 4, 1, 1
X = [[LOG2, 0.0, -2 * LOG2], [2 * LOG2, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (settings(high=1.5), [[1.5, 1, 0.25], [1.5, 1, 1]]),
        (settings("token_mask", 0.5, 2.0), [[2, 1, 0], [0, 1, 1]]),
        (settings("sequence_truncate", None, 3.0), [[0.5], [3]]),  # 2 * 1 / 4, and 4 * 1 * 1
        (settings("sequence_mask", None, 3.0), [[0.5], [0]]),
        (settings(weights="none"), [[1], [1]]),
        # the mean of 1.5, 1, 0.25, 1.5, 1 and 1 is 6.25 / 6
        (settings(high=1.5, weights="normalized"), [[1.44, 0.96, 0.24], [1.44, 0.96, 0.96]]),
        # k1 = -x: -log 2, 0, 2 log 2 and -2 log 2, 0, 0, within log(1/2) and log 2
        (settings(token_k1=2.1), [[2, 1, 0], [0, 1, 1]]),
        (settings(token_k1=[0.2, 5.0]), [[2, 1, 0.25], [3, 1, 1]]),
        # k2: 0.24, 0, 0.96 and 0.96, 0, 0
        (settings(token_k2=0.5), [[2, 1, 0], [0, 1, 1]]),
        # k3: 2 - 1 - 0.693 = 0.307, 0, 0.25 - 1 + 1.386 = 0.636 and 4 - 1 - 1.386 = 1.614, 0, 0
        (settings(token_k3=0.7), [[2, 1, 0.25], [0, 1, 1]]),
        # sums of k1: log 2 and -2 log 2
        (settings(seq_sum_k1=2.1), [[2, 1, 0.25], [0, 0, 0]]),
        # means of k1: log(2) / 3, i.e. a ratio of 1.26, and -2 log(2) / 3, of 0.63: the geometric mask
        (settings(seq_mean_k1=[0.8, 1.3]), [[2, 1, 0.25], [0, 0, 0]]),
        (settings(weights="none", seq_mean_k1=[0.5, 1.2]), [[0], [1]]),
        # means of k3: (0.307 + 0.636) / 3 = 0.314 and 1.614 / 3 = 0.538
        (settings(weights="none", seq_mean_k3=0.4), [[1], [0]]),
        # largest k3: 0.636 and 1.614
        (settings(weights="none", seq_max_k3=0.7), [[1], [0]]),
        # both have to hold
        (settings(weights="none", seq_max_k3=0.7, token_k1=2.1), [[1, 1, 0], [0, 0, 0]]),
        (settings("sequence_truncate", None, 3.0, token_k1=2.1), [[0.5, 0.5, 0], [0, 3, 3]]),
    ],
    ids=str,
)  # fmt: skip
def test_weights_and_masks_by_hand(given, expected):
    found = weights_at_step(given, X) if given.weights != "normalized" else of_batch(given, X)[RATIO].tolist()
    assert found == [pytest.approx(row, abs=1e-12) for row in expected]


def of_batch(given, x, mask=None, ledger=None):
    """What becomes of TRL's output for a generation batch, which has TRL's ratio."""
    inputs, logps = micro_batch(x, mask)
    ratio = importance_ratio(log_ratio(logps, inputs[SAMPLED], inputs["completion_mask"]), given)
    inputs |= {RATIO: ratio, OLD: logps}
    correction = SamplerCorrection(given, ledger or Noted())
    correction.apply_to_batch(inputs)
    if ledger is not None:
        correction.record("train", correction.effect(inputs, logps))
    return inputs


def test_tokens_of_tools_and_padding_have_no_part_in_a_completions_statistic():
    # the second token is a tool's, the third padding: the mean of k1 is log 2, not more
    x, mask = [[-LOG2, 9.0, 9.0]], [[1, 1, 0]]
    inputs, logps = micro_batch(x, mask)
    inputs["tool_mask"] = torch.tensor([[1, 0, 1]])
    CorrectionAtStep(settings(weights="none", seq_mean_k1=2.01, seq_sum_k2=0.25), Noted()).apply(inputs, logps)
    assert inputs[RATIO].tolist() == [[1]]
    inputs.pop(RATIO)
    CorrectionAtStep(settings(weights="none", seq_mean_k1=1.99), Noted()).apply(inputs, logps)
    assert inputs[RATIO].tolist() == [[0]]


def test_a_token_without_log_probs_is_neither_weighed_nor_masked():
    assert weights_at_step(settings(token_k1=1.1), [[math.nan, LOG2]]) == [[1, 0]]


def test_the_sampler_is_the_old_policy_in_a_bypass():
    inputs, logps = micro_batch([[LOG2, math.nan, -9.0]])
    CorrectionAtStep(settings(weights="bypass", token_k1=2.5), Noted()).apply(inputs, logps)
    assert inputs[OLD].tolist() == [pytest.approx([-1 - LOG2, -1, 8])]
    assert inputs[RATIO].tolist() == [[1, 1, 0]]


@pytest.mark.parametrize(
    ("name", "threshold"),
    [("token_k1", 0.5), ("token_k1", [2, 1]), ("token_k1", [1]), ("token_k1", "0.9_1.1"), ("seq_mean_k3", 0),
     ("seq_mean_k3", [1, 2]), ("seq_mean_k2", math.inf), ("seq_max_k3", None), ("seq_sum_k1", [-1, 2]),
     # what YAML makes of `yes` and `1e-2`; and bounds that reject where policy and sampler agree, or all but that
     ("token_k1", True), ("seq_mean_k3", True), ("seq_mean_k3", "1e-2"), ("seq_mean_k1", [0.01, 0.02]),
     ("seq_mean_k1", [1.1, 1.2]), ("token_k1", 1), ("token_k1", [1.0, 1.0])],
)  # fmt: skip
def test_a_threshold_that_masks_everything_or_nothing_is_refused(name, threshold):
    with pytest.raises(ConfigError, match=f"rollout_correction.reject.{name}"):
        bounds_of(name, threshold)


def test_figures_by_hand_are_those_of_both_ways():
    given, mask = settings("token_mask", 0.5, 2.0), [[1, 1, 1], [1, 1, 0]]
    step, whole = Noted(), Noted()
    at_step = CorrectionAtStep(given, step)
    for row in (0, 1):  # micro-batches of one completion
        at_step.apply(*micro_batch(X[row : row + 1], mask[row : row + 1]))
    at_step.drain()
    of_batch(given, X, mask, whole)
    for noted in (step, whole):
        assert noted.mean(LEFT_OUT) == 2 / 5
        assert noted.mean(EFFECTIVE_SAMPLES) == pytest.approx(16 / (5 * 6))  # of 2, 1, 0, 0, 1
        assert noted.mean(SAMPLER_KL) == pytest.approx((-LOG2 + 2 * LOG2 - 2 * LOG2) / 5)
        assert noted.mean(SAMPLER_KL_K3) == pytest.approx((2 - 1 - LOG2 + 0.25 - 1 + 2 * LOG2 + 3 - 2 * LOG2) / 5)


def test_a_failed_completion_has_no_part_in_the_figures():
    noted = Noted()
    at_step = CorrectionAtStep(settings("sequence_mask", None, 3.0, seq_sum_k1=2.0), noted)
    inputs, logps = micro_batch(X, [[1, 1, 1], [0, 0, 0]])
    at_step.apply({**inputs, FAILED: torch.tensor([False, True])}, logps)
    at_step.drain()
    assert noted.found["train", LEFT_OUT] == (0, 1)
    assert noted.mean(EFFECTIVE_SAMPLES) == 1
    all_failed = Noted()
    at_step = CorrectionAtStep(settings(), all_failed)
    inputs, logps = micro_batch(X, [[0, 0, 0], [0, 0, 0]])
    at_step.apply({**inputs, FAILED: torch.tensor([True, True])}, logps)
    at_step.drain()
    assert {count for _, count in all_failed.found.values()} == {0}


def random_batch(seed, rows=6, width=7, scale=0.4):
    generator = torch.Generator().manual_seed(seed)
    logps = -2 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    sampled = logps - scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths).long()
    return logps, sampled, mask


# verl's own function


STUBS = ("verl", "verl.utils", "verl.protocol", "verl.trainer", "verl.trainer.config", "verl.trainer.config.algorithm",
         "verl.workers", "verl.workers.config", "verl.workers.config.actor")  # fmt: skip


@functools.cache
def verl():
    """Its `rollout_corr_helper`, with nothing else of it imported. Skips where there is no verl."""
    spec = importlib.util.find_spec("verl")
    root = os.environ.get("VERL_SOURCE") or (spec.submodule_search_locations[0] if spec else None)
    if root is None:
        pytest.skip("needs verl's sources: VERL_SOURCE=FOLDER/verl of an unpacked wheel of verl 0.9")
    root, functional = Path(root), ModuleType("verl.utils.torch_functional")
    tree = ast.parse((root / "utils" / "torch_functional.py").read_text())
    tree.body = [each for each in tree.body if getattr(each, "name", "") in ("masked_sum", "masked_mean")]
    functional.torch = torch
    exec(compile(tree, "torch_functional.py", "exec"), vars(functional))
    proto = type("DataProto", (), {"from_dict": staticmethod(lambda tensors: SimpleNamespace(batch=tensors))})
    nothing = {"DataProto": proto, "RolloutCorrectionConfig": dict, "PolicyLossConfig": dict}
    stubs = {name: ModuleType(name) for name in STUBS}
    for stub in stubs.values():
        vars(stub).update(nothing)
    stubs["verl.utils"].torch_functional = functional
    kept = {name: sys.modules.get(name) for name in (*stubs, "verl.utils.torch_functional")}
    sys.modules.update(stubs | {"verl.utils.torch_functional": functional})
    try:
        place = importlib.util.spec_from_file_location("corr", root / "trainer" / "ppo" / "rollout_corr_helper.py")
        module = importlib.util.module_from_spec(place)
        place.loader.exec_module(module)
    finally:
        for name, own in kept.items():
            sys.modules.pop(name, None)
            if own is not None:
                sys.modules[name] = own
    return module


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("threshold", "normalize"), [("2.0", False), ("0.5_1.5", False), ("1.3", True)])
def test_weights_are_verls_on_the_same_tensors(seed, level, threshold, normalize):
    helper = verl()
    logps, sampled, mask = random_batch(seed)
    given = {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_batch_normalize": normalize}
    theirs, kept, figures = helper.compute_rollout_correction_and_rejection_mask(logps, sampled, mask, **given)
    *low, high = map(float, threshold.split("_"))
    weights = "normalized" if normalize else "bounded"
    ours = settings(f"{level}_{'mask' if low else 'truncate'}", low[0] if low else None, high, weights)
    noted = Noted()
    found = of_batch(ours, (logps - sampled).tolist(), mask.tolist(), noted)[RATIO] * mask
    torch.testing.assert_close(found, theirs.batch["rollout_is_weights"], rtol=1e-7, atol=1e-9)
    assert torch.equal(kept, mask)
    assert noted.mean(SAMPLER_KL) == pytest.approx(figures["rollout_corr/kl"])
    assert noted.mean(SAMPLER_KL_K3) == pytest.approx(figures["rollout_corr/k3_kl"])
    if level == "token" and not normalize:
        assert noted.mean(EFFECTIVE_SAMPLES) == pytest.approx(figures["rollout_corr/rollout_is_eff_sample_size"])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", [*REJECTIONS, "seq_mean_k1,token_k3"])
def test_masks_are_verls_on_the_same_tensors(seed, name):
    helper = verl()
    logps, sampled, mask = random_batch(seed, rows=40)
    mask[0] = 0  # nothing of it is trained on
    thresholds = {"k1": {"token": [0.7, 1.2], "seq_sum": [0.5, 2.5], "seq_mean": [0.8, 1.1]}, "k2": 0.08, "k3": 0.08}
    wanted = {}
    for each in name.split(","):
        level, _, k = each.rpartition("_")
        wanted[each] = thresholds[k][level] if k == "k1" else thresholds[k] * (3 if level == "seq_sum" else 1)
    spelled = ",".join("_".join(map(str, each)) if isinstance(each, list) else str(each) for each in wanted.values())
    theirs, _ = helper.compute_rollout_rejection_mask(logps - sampled, mask, name, spelled)
    bounds = {each: bounds_of(each, threshold) for each, threshold in wanted.items()}
    ours = within(log_ratio(logps, sampled, mask), mask, bounds) * mask
    assert torch.equal(ours, theirs)
    assert 0 < ours.sum() < mask.sum()


# In TRL's loss

CASES = [
    *(settings(mode, 0.7, 1.4) for mode in MODES),
    *(settings(mode, 0.7, 1.4, weights) for mode in MODES[:3:2] for weights in ("normalized", "none", "bypass")),
    settings(seq_mean_k1=1.1), settings(seq_mean_k3=0.08), settings(token_k3=0.1), settings(seq_max_k2=0.3),
    settings("sequence_truncate", token_k1=1.5), settings(weights="bypass", seq_mean_k1=1.1),
]  # fmt: skip


def plain(given, logps, start, sampled, mask, advantages, normal):
    """The gradient's loss, a completion and a token at a time. `start`: log-probs of the policy at the start of the
    step."""
    losses = []
    for row in range(len(mask)):
        tokens = [place for place in range(mask.size(1)) if mask[row, place]]
        x = {place: (start[row, place] - sampled[row, place]).item() for place in tokens}
        k = {"k1": lambda v: -v, "k2": lambda v: v * v / 2, "k3": lambda v: math.exp(v) - 1 - v}
        total = 0.0
        for place in tokens:
            ratio = math.exp(sum(x.values()) if given.mode.startswith("seq") else x[place])
            if given.mode.endswith("mask"):
                ratio = ratio if given.low <= ratio <= given.high else 0.0
            else:
                ratio = max(given.low or 0.0, min(given.high, ratio))
            weight = {"bounded": ratio, "normalized": ratio / normal, "none": 1.0, "bypass": 1.0}[given.weights]
            for name, (low, high) in given.reject.items():
                level, _, kind = name.rpartition("_")
                of_all = [k[kind](each) for each in x.values()]
                value = {"token": k[kind](x[place]), "seq_sum": sum(of_all), "seq_mean": sum(of_all) / len(of_all),
                         "seq_max": max(of_all)}[level]  # fmt: skip
                weight *= low <= value <= high
            old = sampled[row, place] if given.weights == "bypass" else start[row, place]
            step = (logps[row, place] - old).exp()
            clipped = step.clamp(0.8, 1.2)
            total = total - weight * torch.min(step * advantages[row], clipped * advantages[row])
        losses.append(total / len(tokens))
    return sum(losses) / len(losses)


def mean_weight(given, logps, sampled, mask):
    ratio = importance_ratio(log_ratio(logps, sampled, mask), given)
    return (ratio * mask).sum() / mask.sum() if ratio.size(1) > 1 else ratio.mean()


@pytest.mark.parametrize("moved", [0.0, 0.3], ids=["first_update", "later_update"])
@pytest.mark.parametrize("given", CASES, ids=str)
def test_the_gradient_in_trls_loss_is_that_of_a_plain_loop(given, moved):
    from trl import GRPOTrainer  # the two ranks below do without

    values, sampled, mask = random_batch(3)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0], dtype=torch.float64)
    now = values + moved * random_batch(4)[0]  # of a policy that has been updated with this batch before
    logps, expected = now.clone().requires_grad_(), now.clone().requires_grad_()
    inputs = {
        "prompt_ids": mask[:, :1], "prompt_mask": mask[:, :1], "completion_ids": mask, "completion_mask": mask,
        "advantages": advantages, SAMPLED: sampled,
    }  # fmt: skip
    ratio = importance_ratio(log_ratio(values, sampled, mask), given)
    if moved or given.weights == "normalized":  # only where the whole batch is known
        inputs |= {OLD: values, RATIO: ratio}
        SamplerCorrection(given, Noted()).apply_to_batch(inputs)

    def log_probs(*_, **__):
        CorrectionAtStep(given, Noted()).apply(inputs, logps)
        return logps, torch.zeros_like(values), None

    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=log_probs, aux_loss_enabled=False, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, importance_sampling_level="token", beta=0.0, loss_type="grpo", epsilon_low=0.2,
        epsilon_high=0.2, args=SimpleNamespace(delta=None), use_vllm=True, vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(gather=lambda value: value, reduce=lambda value, reduction: value),
    )  # fmt: skip
    inspect.unwrap(GRPOTrainer._compute_loss)(trainer, None, inputs).backward()
    normal = mean_weight(given, values, sampled, mask)
    plain(given, expected, values, sampled, mask, advantages, normal).backward()
    assert expected.grad.abs().sum() > 0
    torch.testing.assert_close(logps.grad, expected.grad, rtol=1e-12, atol=1e-14)


# Two ranks


def test_two_ranks_have_the_weights_and_figures_of_both_their_batches(tmp_path):
    ranks = run_ranks(of_one_machine(), [__file__, str(tmp_path)], tmp_path, 60, OMP_NUM_THREADS="1")
    together = [random_batch(seed) for seed in (0, 1)]
    logps, sampled, mask = (torch.cat(each) for each in zip(*together, strict=True))
    for number, (name, given) in enumerate(ON_RANKS):
        noted = Noted()
        inputs = of_batch(given, (logps - sampled).tolist(), mask.tolist(), noted)
        alone = CorrectionAtStep(given, of_step := Noted())
        one, other = (rank[number] for rank in ranks)
        assert one["figures"] == other["figures"], name
        assert one["figures"] == [pytest.approx(value) for value in noted.found.values()], name
        assert torch.tensor(one["weights"] + other["weights"]).sub(inputs[RATIO]).abs().max() < 1e-6
        if given.weights != "normalized":
            alone.apply({"completion_mask": mask, SAMPLED: sampled}, logps)
            alone.drain()
            assert one["figures"] == [pytest.approx(value) for value in of_step.found.values()], name


ON_RANKS = [("bounded", settings("token_mask", 0.7, 1.4)), ("normalized", settings(weights="normalized")),
            ("normalized completions", settings("sequence_truncate", None, 1.2, "normalized")),
            ("geometric", settings(seq_mean_k1=1.1)),
            ("bypass", settings(weights="bypass", token_k3=0.1))]  # fmt: skip


def main(out):
    from accelerate import PartialState

    rank = PartialState(cpu=True).process_index
    logps, sampled, mask = random_batch(rank)
    told = []
    for _, given in ON_RANKS:
        noted = Noted()
        weights = of_batch(given, (logps - sampled).tolist(), mask.tolist(), noted)[RATIO]
        told.append({"weights": weights.tolist(), "figures": [*noted.found.values()]})
        if given.weights != "normalized":
            at_step = CorrectionAtStep(given, other := Noted())
            for row in range(len(mask)):
                part = slice(row, row + 1)
                at_step.apply({"completion_mask": mask[part], SAMPLED: sampled[part]}, logps[part])
            at_step.drain()
            assert [*other.found.values()] == [pytest.approx(value) for value in noted.found.values()]
    Path(out, f"rank{rank}.json").write_text(json.dumps(told))
    with contextlib.suppress(AttributeError):
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
