"""The trainer against loopback services: what failures do to an update, and which metrics a step has."""

import logging
from pathlib import Path

import pytest
import torch
import trl.trainer.grpo_trainer as upstream_trainer
from support.loopback import ACTION, BAD, VERDICT
from support.scripted import DIFFERENT, Scripted, steps_of
from transformers import TrainerCallback

from salesrl_trl.checkpoint.identity import identity_of_run
from salesrl_trl.errors import ConfigError, DivergedError, RunStopped, TooFewRewardsError
from salesrl_trl.trainer import RolloutTrainer


class ScriptedRollouts(Scripted, RolloutTrainer):
    """The trainer of `mode: rollouts`."""


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def moved(before, after):
    return any(not torch.equal(before[name], after[name]) for name in before)


def test_a_step_learns_and_logs_every_metric(scripted_trainer, caplog, capfd, tmp_path):
    trainer = scripted_trainer(disable_tqdm=False)
    before = weights(trainer)
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        trainer.train()
    shown = capfd.readouterr()
    assert "{'loss'" not in shown.out + shown.err  # transformers' print of every figure
    assert [caplog.text.count(f"[Step {step}/4]") for step in (1, 2, 3, 4)] == [1, 1, 1, 1]
    assert (tmp_path / "run/trace.json").is_file()
    assert moved(before, weights(trainer))
    names = set(trainer.components.ledger.names)
    for logs in steps_of(trainer):
        assert names <= set(logs)
        assert logs["outcome/ok"] == logs["outcome/invalid_action"] == 0.5
        # each group holds one action judged 0.75 and one that is none, worth 0: mean 0.375
        assert logs["reward"] == pytest.approx(0.375)


def test_rollouts_alone_are_generated_and_scored_as_in_training_and_move_nothing(scripted_trainer):
    trainer = scripted_trainer(kind=ScriptedRollouts, gradient_accumulation_steps=2)
    before = weights(trainer)
    trainer.train()
    assert not moved(before, weights(trainer))
    assert not trainer.optimizer.state
    for logs in steps_of(trainer):
        assert (logs["reward"], logs["outcome/ok"], logs["time/backward_s"]) == (pytest.approx(0.375), 0.5, 0)
    assert trainer.generated == 4 * 2 * 4


def test_the_reference_is_not_spread_over_the_gpus_in_sight(scripted_trainer, monkeypatch):
    stock, seen = upstream_trainer.create_model_from_path, []
    monkeypatch.setattr(
        upstream_trainer, "create_model_from_path", lambda *args, **given: seen.append(given) or stock(*args, **given)
    )
    scripted_trainer()
    assert [given["device_map"] for given in seen] == [None]


def test_a_policy_that_blew_up_ends_the_run_and_keeps_the_checkpoints_as_they_were(scripted_trainer, tmp_path):
    trainer = scripted_trainer(texts=DIFFERENT, max_steps=9)
    trainer.args.learning_rate = 1e30  # no recipe may have it
    with pytest.raises(DivergedError, match=r"`grad_norm` is nan, in the last of 3 diverged log lines in a row"):
        trainer.train()
    assert not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.parametrize("scaler", ["none", "clipping unscales", "nothing unscales"])
def test_momentum_does_not_move_the_policy_on_a_skipped_batch(scripted_trainer, services, monkeypatch, scaler):
    """Nor is such a batch a fault to fp16's scaler, which refuses a step in which it saw no gradient. It looks for
    overflows when gradients are unscaled: while they are clipped, else inside of the optimizer's step, when those of a
    skipped batch are gone."""
    texts = [
        text for first, second in zip(DIFFERENT[::2], DIFFERENT[1::2], strict=True) for text in (first, second, BAD)
    ]
    trainer = scripted_trainer(
        texts=texts, max_steps=4, max_skipped_generations=5, min_valid_reward_fraction=0.9, max_grad_norm=0.0
    )
    if scaler != "none":
        accelerator = trainer.accelerator
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=64.0), True
        monkeypatch.setattr(accelerator.state, "_mixed_precision", "fp16")  # all trainers share it
    if scaler == "nothing unscales":
        trainer._get_grad_norm = lambda *_, **__: 0.0
    seen = []
    trainer.add_callback(_AfterEachStep(lambda: seen.append(weights(trainer)), at=2, then=lambda: _break(services)))
    with pytest.raises(TooFewRewardsError):
        trainer.train()
    assert moved(seen[0], seen[1])
    assert not moved(seen[2], seen[3])


def test_a_run_that_is_told_to_stop_inside_an_epoch_evaluates_no_more(scripted_trainer):
    trainer = scripted_trainer(
        texts=DIFFERENT, max_steps=8, eval_strategy="epoch", save_strategy="epoch",
        metric_for_best_model="eval_reward",
        load_best_model_at_end=True, num_generations_eval=2, per_device_eval_batch_size=4,
    )  # fmt: skip
    stop = _AfterEachStep(lambda: None, at=2, then=lambda: trainer.request_stop("SIGTERM"))
    trainer.callback_handler.callbacks.insert(0, stop)  # before the one that asks whether to stop
    with pytest.raises(RunStopped):
        trainer.train()
    assert trainer.state.global_step == 2
    assert [entry for entry in trainer.state.log_history if "eval_reward" in entry] == []
    assert (Path(trainer.args.output_dir) / "checkpoint-2" / "model.safetensors").is_file()


def test_a_stop_that_comes_while_a_run_is_looked_at_is_not_lost(scripted_trainer, monkeypatch):
    trainer = scripted_trainer(texts=DIFFERENT, max_steps=4, max_skipped_generations=5)

    def asked(*given):
        trainer.request_stop("SIGTERM")
        return identity_of_run(*given)

    monkeypatch.setattr("salesrl_trl.wiring.policy.identity_of_run", asked)
    with pytest.raises(RunStopped, match="SIGTERM before another step was done"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_what_a_customer_said_does_not_reach_the_log_by_way_of_trls_warning(scripted_trainer, services, caplog):
    upstream = logging.getLogger("trl.trainer.grpo_trainer")
    trainer = scripted_trainer(texts=(ACTION,), max_steps=1)
    _break(services)
    with caplog.at_level(logging.WARNING):
        trainer.train()
        assert "skipping an update" in caplog.text
        assert "What does Python cost?" not in caplog.text
        ours = list(upstream.filters)
        upstream.filters.clear()
        try:
            trainer.train()
        finally:
            upstream.filters[:] = ours
    assert "What does Python cost?" in caplog.text  # TRL's own behaviour; if it goes, so can our filter


def test_it_says_how_many_groups_had_one_score(scripted_trainer, services, caplog):
    caplog.set_level(logging.INFO)
    texts = (*DIFFERENT[:2], DIFFERENT[2], BAD, *DIFFERENT[4:6], DIFFERENT[6], BAD)
    services.judge_by(lambda system, user: 500 if '"q1"' in user or '"q5"' in user else VERDICT)
    trainer = scripted_trainer(texts=texts, max_steps=2, lr_scheduler_type="constant_with_warmup", warmup_steps=1)
    trainer.train()
    # of either step's two groups the first has a single score
    assert [logs["failures/single_scored"] for logs in steps_of(trainer)] == [0.5, 0.5]
    off = "off: the check that vLLM samples from the weights being trained, because transformers generates"
    assert caplog.text.count(off) == 1


def _break(services):
    services.set("8b", {}, status=500)


class _AfterEachStep(TrainerCallback):
    def __init__(self, call, at, then):
        self.call, self.at, self.then = call, at, then

    def on_step_end(self, args, state, control, **_):
        self.call()
        if state.global_step == self.at:
            self.then()


def test_a_rollout_func_writes_completions_and_calls_no_tools(scripted_trainer, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    calls_tools = []

    def rollout(prompts, trainer):
        if calls_tools:
            trainer._tool_call_loop(prompts)
        ids = [*trainer._tokenizer(ACTION)["input_ids"], trainer._tokenizer.eos_token_id]
        prompt_ids, *_ = trainer._tokenize_prompts(prompts)
        return {"prompt_ids": prompt_ids, "completion_ids": [ids for _ in prompts], "logprobs": None}

    trainer = scripted_trainer(rollout_func=rollout, max_steps=2)
    trainer.train()
    assert [logs["reward"] for logs in steps_of(trainer)] == [0.75, 0.75]  # of ACTION, by the judge on loopback
    calls_tools.append(True)
    with pytest.raises(ConfigError, match="`rollout_func` calls tools that TRL was not given"):
        trainer.train()
