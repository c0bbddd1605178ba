"""Training with each prompt once through the model, and without a pass for old log-probs: stock TRL's figures."""

import itertools
import random

import pytest
import torch
from support.keyed import make_tiny_policy
from support.scripted import Gradients, ScriptedTrainer, ScriptedUpstream, default_rows, length, settings, steps_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.config.rollouts import correction_at_step, correction_of
from salesrl_trl.ground.process import patched
from salesrl_trl.launch.data.sources import build_dataset
from salesrl_trl.names import EFFECTIVE_SAMPLES, LEFT_OUT, SAMPLER_KL, SAMPLER_KL_K3
from salesrl_trl.reward.functions import per_completion
from salesrl_trl.update.correction import FIGURES

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 2e-6
"""Relative, in float32: sums of eight micro-batches, in another order."""
OTHERS = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "kl")
"""Times, and the KL of the branches, which is a mean over all tokens."""
SIZES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "num_generations": 4, "max_steps": 2,
         "optim": "sgd"}  # fmt: skip
"""A group lies in two micro-batches, and an update has four groups."""
WORDS = ("price", "course", "schedule", "refund", "data", "nurse", "evening", "a", "b")


class Passes(Gradients):
    """The gradient of every update, and the passes through the model before it."""

    def __init__(self, trainer):
        super().__init__(trainer)
        self.passes, self._passes = [], 0
        trainer.model.register_forward_pre_hook(self._count)

    def _count(self, *_):
        self._passes += 1

    def on_pre_optimizer_step(self, *given, **named):
        super().on_pre_optimizer_step(*given, **named)
        self.passes.append(self._passes)
        self._passes = 0


def with_log_probs(kind):
    """A trainer whose completions have different lengths, and log-probs of a sampler that is another policy."""

    class Sampling(kind):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            ids, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            draw = random.Random(self.generated)
            return ids, [[draw.gauss(-8.0, 0.3) for _ in each] for each in ids]

    return Sampling


def train(kind, policy, folder, *, reward=length, in_order=True, **given):
    """The trainer after its run, and its gradients."""
    draw = random.Random(0)
    is_ours = kind is ScriptedTrainer
    config = SalesGRPOConfig if is_ours else GRPOConfig
    if not is_ours:
        given = {name: value for name, value in given.items() if not name.startswith("shared_prompts")}
    else:
        given["kl_log_ratio_clamp"] = 0.0
    torch.manual_seed(0)
    trainer = with_log_probs(kind)(
        AutoModelForCausalLM.from_pretrained(policy),
        reward,
        config(**settings(folder, **{"beta": 0.1, **SIZES, **given})),
        train_dataset=build_dataset(default_rows(), "compact"),
        processing_class=AutoTokenizer.from_pretrained(policy),
    )
    trainer.texts = tuple(" ".join(draw.choices(WORDS, k=draw.randrange(1, 9))) for _ in range(97))
    trainer.use_vllm = True  # as far as the correction goes
    if is_ours:
        trainer.components.passes.in_order &= in_order
        with patched(trainer.args, "use_vllm", True):
            components = trainer.components
            components.passes._correction = correction_at_step(trainer.args, components.ledger)
            components.scoring.correction = correction_of(trainer.args, components.ledger)
    gradients = Passes(trainer)
    trainer.train()
    if is_ours:
        trainer.finish()
    return trainer, gradients


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("two layers"), num_hidden_layers=2)


def assert_same_gradients(ours, stock):
    assert len(ours.found) == len(stock.found) == SIZES["max_steps"]
    for mine, theirs in zip(ours.found, stock.found, strict=True):
        assert theirs.norm() > 1e-3
        assert (mine - theirs).norm() / theirs.norm() < TOLERANCE


@pytest.mark.parametrize(
    ("mode", "low", "high", "loss_type"),
    [("token_truncate", None, 1.1, "dapo"), ("sequence_mask", 0.7, 1.5, "vespo")],
)
def test_the_pass_that_trains_gives_trls_importance_ratio_and_all_of_its_figures(
    policy, tmp_path, mode, low, high, loss_type
):
    given = {
        "loss_type": loss_type, "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_min": low,
        "vllm_importance_sampling_clip_max": high,
    }  # fmt: skip
    stock, theirs = train(ScriptedUpstream, policy, tmp_path / "stock", **given)
    ours, mine = train(ScriptedTrainer, policy, tmp_path / "ours", in_order=False, shared_prompts=400, **given)
    assert_same_gradients(mine, theirs)
    for step, wanted in zip(steps_of(ours), steps_of(stock), strict=True):
        assert wanted["sampling/sampling_logp_difference/mean"] > 0.01
        for name in set(wanted) - set(OTHERS):
            assert step[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6), name
    assert all(step[LEFT_OUT] is not None for step in steps_of(ours))
    # TRL's way: 8 for old log-probs and 8 that train
    assert theirs.passes == [16, 16]
    assert mine.passes[-1] < 8


@pytest.mark.parametrize(
    "correction",
    [
        {},
        {"weights": "bypass", "reject": {"token_k1": [0.5, 4.0]}},
        {"weights": "none", "reject": {"seq_mean_k1": [0.8, 2.0], "token_k3": 1.0}},
    ],
    ids=str,
)
def test_a_correction_at_the_step_is_that_of_a_pass_for_old_log_probs(policy, tmp_path, correction):
    given = {"rollout_correction": correction, "vllm_importance_sampling_mode": "token_mask", "in_order": False}
    ours, at_step = train(ScriptedTrainer, policy, tmp_path / "at step", **given)
    before, of_pass = train(ScriptedTrainer, policy, tmp_path / "before", shared_prompts="off", **given)
    assert_same_gradients(at_step, of_pass)
    for step, wanted in zip(steps_of(ours), steps_of(before), strict=True):
        for name in (LEFT_OUT, EFFECTIVE_SAMPLES, SAMPLER_KL, SAMPLER_KL_K3, *FIGURES, "clip_ratio/region_mean"):
            assert step[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
    assert 0 < steps_of(before)[0][LEFT_OUT] < 1 or not correction
    assert at_step.passes[-1] < of_pass.passes[-1]


@pytest.mark.parametrize("weights", ["normalized", "bypass"])
def test_a_correction_serves_several_updates_of_a_generation_batch(policy, tmp_path, weights):
    given = {
        "rollout_correction": {"weights": weights, "reject": {"token_k1": [0.5, 4.0]}},
        "steps_per_generation": 16,
    }
    ours, gradients = train(ScriptedTrainer, policy, tmp_path, vllm_importance_sampling_mode="token_truncate", **given)
    assert all(gradient.isfinite().all() and gradient.norm() > 0 for gradient in gradients.found)
    assert 0 < steps_of(ours)[0][EFFECTIVE_SAMPLES] <= 1
    assert 0 < steps_of(ours)[0][LEFT_OUT] < 1


def test_a_skipped_batch_has_no_figures_of_the_correction(policy, tmp_path):
    asked = itertools.count()

    @per_completion
    def late(completion):
        return None if next(asked) < 16 else len(completion[0]["content"]) % 13 / 13

    ours, _ = train(ScriptedTrainer, policy, tmp_path, reward=late)
    figures = [[line[name] for name in FIGURES] for line in steps_of(ours)]
    assert figures[0] == [None] * len(FIGURES)
    assert figures[1][0] > 0.01
    assert ours.components.passes.prompts.is_checked
