"""A trainer around a small policy and services on loopback."""

import pytest
from support.loopback import ACTION, BAD, any_action


@pytest.fixture
def any_text_is_an_action(monkeypatch):
    monkeypatch.setattr("salesrl_trl.judged.chain.parse_action", any_action)


@pytest.fixture
def scripted_trainer(tiny, services, tmp_path):
    """Build a trainer whose completions are scripted and whose services are on loopback.

    `chain` are settings of the reward chain, everything else the trainer's.
    """
    # importing TRL takes seconds, and not all tests here need it
    from support.scripted import build_trainer, default_rows, loopback_reward

    built = []

    def build(texts=(ACTION, BAD), chain=None, **settings):
        rows = default_rows()
        reward = loopback_reward(services, rows, **(chain or {}))
        built.append(build_trainer(tiny, reward, texts, rows, tmp_path / "run", **settings))
        return built[-1]

    yield build
    for trainer in built:
        trainer.finish()
