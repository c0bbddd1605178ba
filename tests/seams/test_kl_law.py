"""A KL law of one's own is one class outside of the package, handed in as an object or named by its dotted path."""

import math

import pytest
from support.loopback import Services
from support.scripted import build_trainer, default_rows, loopback_reward, settings

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.errors import ConfigError
from salesrl_trl.kl.branched import BranchedKL
from salesrl_trl.kl.law import KLTarget


class Smoothed:
    """Moves a coefficient by the mean of this window's distance and the ones before."""

    def __init__(self, gain=0.02):
        self.gain = gain

    def move(self, window, state):
        distance = (window.target.distance(window.kl) + state.get("distance", 0.0)) / 2
        return window.beta * math.exp(self.gain * distance), {"distance": distance}


SMOOTHED = f"{__name__}.Smoothed"
TARGETS = {
    "fairness": KLTarget(beta=0.1, low=0.02, high=0.06),
    "hallucination": KLTarget(beta=0.3, low=0.08, high=0.15),
}
WINDOW = 2


@pytest.fixture
def config(tmp_path):
    return lambda **given: SalesGRPOConfig(**settings(tmp_path, kl_update_steps=WINDOW, **given))


def branched(config, law):
    return BranchedKL(TARGETS, law, config.kl_settings.windows, config.kl_penalty())


def simulate(kl, steps):
    """A run whose KL is as high as each branch's coefficient is low; 100 tokens of a branch in a step."""
    for step in steps:
        kls = [0.02 / beta * (1 + 0.1 * math.sin(step)) for beta in kl.control.betas]
        kl.end_step([[100 * each, 0.0, 0.0, 100.0, 100.0] for each in kls], step, is_logged=True)


def test_a_law_by_its_dotted_path_brings_the_kl_into_its_band(config):
    by_path = config(kl_law=SMOOTHED, kl_law_settings='{"gain": 0.05}')
    law = by_path.kl_settings.law_of()
    assert (type(law).__name__, law.gain) == ("Smoothed", 0.05)
    kl = branched(by_path, law)
    assert [target.contains(0.02 / target.beta) for target in TARGETS.values()] == [False, False]
    simulate(kl, range(60))
    assert all(target.contains(0.02 / beta) for target, beta in zip(TARGETS.values(), kl.control.betas, strict=True))


def test_another_law_goes_on_with_the_coefficients_and_without_the_state(config, tmp_path):
    packaged = config()
    before = branched(packaged, packaged.kl_settings.law_of())
    simulate(before, range(10))
    before.save(tmp_path)
    by_path = config(kl_law=SMOOTHED)
    after = branched(by_path, by_path.kl_settings.law_of())
    after.load(tmp_path)
    assert after.control.betas == before.control.betas != [0.1, 0.3]
    assert after.control.state_dict()["fairness"]["law_state"] == {}


def test_a_law_that_breaks_during_a_run_ends_it(config):
    class Breaking:
        def move(self, window, state):
            return (window.beta, {"seen": True}) if not state else (math.inf, state)

    kl = branched(config(), config().kl_settings.law_of(Breaking()))
    simulate(kl, range(WINDOW))
    with pytest.raises(ConfigError, match=r"Breaking returned \(inf, {'seen': True}\)"):
        simulate(kl, range(WINDOW))


def test_a_law_stays_unused_without_control_and_comes_from_one_place_only(config):
    law = config(kl_law=SMOOTHED).kl_settings.law_of()
    assert config(kl_law="fixed").kl_settings.law_of() is None
    assert config().kl_settings.law_of(law) is law
    with pytest.raises(ConfigError, match="is an object or `fixed`, but `law`"):
        config(kl_law=SMOOTHED).kl_settings.law_of(law)
    with pytest.raises(ConfigError, match="missing a required argument"):
        config().kl_settings.law_of(type(law))


class Faster:
    """Raises a coefficient at the end of every window, each time by more."""

    def move(self, window, state):
        windows = state.get("windows", 0)
        return (1.5 + windows / 10) * window.beta, {"windows": windows + 1}


def test_a_trainer_takes_a_law_as_an_object_whose_state_is_in_checkpoints(tiny, httpserver, tmp_path):
    def train(name, **given):
        rows, bands = default_rows(), {branch: {"beta": 0.1, "low": 0.02, "high": 0.06} for branch in TARGETS}
        reward = loopback_reward(Services(httpserver), rows)
        more = {"beta": 0.0, "branch_kl": bands, "kl_update_steps": 1, "save_strategy": "steps", "save_steps": 2}
        trainer = build_trainer(tiny, reward, ("hello",), rows, tmp_path / name, kl_law=Faster(), **more, **given)
        trainer.train(given.get("resume_from_checkpoint"))
        trainer.finish()
        return [logs["beta/fairness"] for logs in trainer.state.log_history if "beta/fairness" in logs]

    assert train("whole") == pytest.approx([0.1, 0.15, 0.24, 0.408])
    (tmp_path / "whole" / "checkpoint-4").rename(tmp_path / "checkpoint-4")
    resumed = train("resumed", max_steps=6, resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed[-2:] == pytest.approx([0.7344, 1.39536])
