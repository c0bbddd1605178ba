"""Another generation engine is one class outside of the package, handed in or named by its dotted path."""

import logging

import pytest
from seams.own_engine import Writer
from support.loopback import Services
from support.scripted import build_trainer, default_rows, loopback_reward, steps_of

from salesrl_trl.config.quick_evaluations import QuickEvalSettings
from salesrl_trl.errors import ConfigError
from salesrl_trl.trainer import SalesGRPOTrainer

PATH = "seams.own_engine.Writer"


@pytest.fixture
def train(tiny, httpserver, tmp_path):
    def train(**given):
        rows = default_rows()
        services = Services(httpserver)
        reward = loopback_reward(services, rows)
        given = {"max_completion_length": 128, **given}
        trainer = build_trainer(tiny, reward, (), rows, tmp_path / "run", kind=SalesGRPOTrainer, **given)
        try:
            trainer.train()
        finally:
            trainer.finish()
        return trainer, trainer.components.sampler

    return train


@pytest.mark.parametrize("given", [{"sampler": Writer}, {"sampler": PATH}], ids=["object", "dotted path"])
def test_another_engine_generates_what_is_scored_and_trained_on(train, given):
    trainer, engine = train(**given, max_steps=3, quick_eval=QuickEvalSettings(steps=2, rows=2))
    assert len(engine.written) == 3 * 4 + 2
    assert engine.written.count("greedy") == 2
    assert all(logs["outcome/ok"] == 1 for logs in steps_of(trainer))
    assert len(set(engine.weights)) == 3  # before each step; the quick evaluation has those of the step behind it


def test_completions_of_another_engine_may_be_generated_ahead_and_are_whole_batches(train, caplog):
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        trainer, engine = train(sampler=Writer, max_steps=4, rollout_lookahead=2, partial_rollouts=0.5)
    assert caplog.text.count("`partial_rollouts` is ignored here, because `sampler` is a custom engine") == 1
    assert "of a batch unfinished" not in caplog.text
    assert [logs["rollout/staleness"] for logs in steps_of(trainer)] == [0, 1, 2, 2]
    assert len(engine.written) == 4 * 4


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_log_probs_of_another_engine_are_the_old_ones_of_what_it_generates_ahead(train, lookahead, monkeypatch):
    class Knowing(Writer):
        logprob = -5.0

        def write(self, *given):
            completions, _ = super().write(*given)
            return completions, [[self.logprob] * len(each) for each in completions]

    old, compute = [], SalesGRPOTrainer._compute_loss

    def loss(self, model, inputs):
        old.append(inputs.get("old_per_token_logps"))
        return compute(self, model, inputs)

    monkeypatch.setattr(SalesGRPOTrainer, "_compute_loss", loss)
    train(sampler=Knowing, max_steps=2, rollout_lookahead=lookahead)
    assert [None if each is None else each.amin().item() for each in old] == [-5.0 if lookahead else None] * 2
    if lookahead:
        with pytest.raises(ConfigError, match="a log-prob that is not a number"):
            train(sampler=type("Unknowing", (Knowing,), {"logprob": None}), max_steps=1, rollout_lookahead=lookahead)
