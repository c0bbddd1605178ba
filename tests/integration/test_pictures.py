"""A policy that reads pictures, in rows with and without them, trains as by stock TRL."""

import asyncio

import pytest
from support.loopback import ACTION, BAD, build_reward
from support.scripted import Gradients, ScriptedTrainer, ScriptedUpstream, settings
from support.seeing import make_seeing_policy, seeing_rows
from transformers import AutoModelForImageTextToText
from trl import GRPOConfig

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.data.processor import load_processor
from salesrl_trl.launch.data.sources import build_dataset
from salesrl_trl.types import DEFAULT_BRANCHES

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = (ACTION, BAD, f"{ACTION} ", BAD, BAD)
TOLERANCE = 1e-5
"""Relative to the norm: sums in another order, in float32."""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return make_seeing_policy(tmp_path_factory.mktemp("seeing") / "policy")


def train(kind, seeing, services, folder, least=0, **given):
    """The gradients of two steps on the rows with at least so many pictures, and the trainer."""
    ours = kind is ScriptedTrainer
    rows = [row for row in seeing_rows(folder, DEFAULT_BRANCHES) if len(row.images) >= least]
    if ours:
        given = {"held_out_eval": False, "scored_groups_first": False, "kl_log_ratio_clamp": 0.0, **given}
    given = {"per_device_train_batch_size": 8, "max_steps": 2, "beta": 0.1, "learning_rate": 1e-3, **given}
    trainer = kind(
        AutoModelForImageTextToText.from_pretrained(seeing),
        build_reward(services.url, rows, invalid_action_reward=0.0),
        (SalesGRPOConfig if ours else GRPOConfig)(**settings(folder, **given)),
        train_dataset=build_dataset(rows, "compact"),
        eval_dataset=build_dataset(rows, "compact"),
        processing_class=load_processor(str(seeing)),
    )
    trainer.texts, gradients = TEXTS, Gradients(trainer)
    trainer.train()
    if ours:
        trainer.finish()
    else:
        asyncio.run_coroutine_threadsafe(trainer.reward_funcs[0].aclose(), trainer.async_loop).result()
    return gradients.found, trainer


def test_gradients_are_those_of_trl_and_reach_the_vision_tower(seeing, services, tmp_path):
    mine, trainer = train(ScriptedTrainer, seeing, services, tmp_path, least=1)
    theirs, stock = train(ScriptedUpstream, seeing, services, tmp_path, least=1)  # TRL can't mix in rows without any
    assert len(mine) == len(theirs) == 2
    for own, other in zip(mine, theirs, strict=True):
        assert other.norm() > 1e-3
        assert (own - other).norm() < TOLERANCE * other.norm()
    before = AutoModelForImageTextToText.from_pretrained(seeing).model.visual.patch_embed.proj.weight
    after = [each.model.model.visual.patch_embed.proj.weight for each in (trainer, stock)]
    assert (after[0] - after[1]).norm() < TOLERANCE * after[1].norm()
    assert (after[0] - before).norm() > 10 * TOLERANCE * before.norm()


def test_micro_batches_of_scored_groups_have_their_own_pictures(seeing, services, tmp_path):
    halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    whole, _ = train(ScriptedTrainer, seeing, services, tmp_path, **halves)
    parts, _ = train(ScriptedTrainer, seeing, services, tmp_path, **halves, scored_groups_first=True)
    for own, other in zip(parts, whole, strict=True):
        assert (own - other).norm() < TOLERANCE * other.norm()
    with pytest.raises(ConfigError, match="a vision policy is trained with a lookahead"):
        train(ScriptedTrainer, seeing, services, tmp_path, **halves, rollout_lookahead=1)
