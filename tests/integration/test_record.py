"""A run that is recorded, and runs whose rewards come from its record."""

import functools
import math
from itertools import groupby

import pytest
import torch
from support.loopback import ACTION, BAD, action
from support.scripted import build_trainer, default_rows, loopback_reward

from salesrl_trl.config import RewardConfig, TelemetryConfig
from salesrl_trl.errors import ConfigError
from salesrl_trl.recording.reader import recorded
from salesrl_trl.recording.schema import record_file
from salesrl_trl.recording.writer import Recorder
from salesrl_trl.reward.replay import ReplayReward
from salesrl_trl.telemetry.instruments import Instruments, InstrumentSettings

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = (ACTION, BAD, action("refund"), action("Python"), action("price"))
STEPS = 4


def instruments(folder, **given):
    recorder = Recorder(record_file(folder, 0), **given)
    return Instruments(InstrumentSettings(), torch.device("cpu"), folder, recorder)


def train(policy, folder, reward, **given):
    trainer = build_trainer(policy, reward, TEXTS, default_rows(), folder, max_steps=STEPS, **given)
    trainer.train()
    trainer.evaluate()
    trainer.finish()
    return trainer


@pytest.fixture(scope="module")
def run_of(tiny, tmp_path_factory):
    return functools.partial(train, tiny)


@pytest.fixture
def recorded_run(run_of, services, tmp_path):
    """A run with a service that fails for one kind of action, and its folder."""

    def answer(request):
        return (503, "busy") if request.json["rewritten_query"] == "refund" else services.answers["8b"][0]

    services.functions["8b"] = answer
    trainer = run_of(
        tmp_path / "first", loopback_reward(services, default_rows(), records=True),
        instruments=instruments(tmp_path / "first"),
    )  # fmt: skip
    return trainer, tmp_path / "first"


def weights(trainer):
    return torch.cat([each.detach().flatten() for each in trainer.model.parameters()])


def test_a_replay_ends_with_the_same_weights_and_asks_nobody(run_of, recorded_run, services, tmp_path):
    first, folder = recorded_run
    asked = services.calls
    chain = loopback_reward(services, default_rows())
    again = [run_of(tmp_path / name, ReplayReward(chain, folder, "fail")) for name in ("second", "third")]
    assert services.calls == asked
    for trainer in again:
        assert torch.equal(weights(trainer), weights(first))
    rewards = [[entry["reward"] for entry in each.state.log_history if "reward" in entry] for each in (first, *again)]
    assert rewards[0] == rewards[1] == rewards[2]


def test_it_has_every_completion_with_what_it_earned_against_its_group(recorded_run):
    first, folder = recorded_run
    found = [*recorded(folder, "train")]
    assert [each.step for each in found] == [step for step in range(1, STEPS + 1) for _ in range(4)]
    assert {each.text for each in found} == set(TEXTS)
    assert {each.outcome for each in found} == {"ok", "invalid_action", "infra"}
    for step, of_step in groupby(found, key=lambda each: each.step):
        of_step = [*of_step]
        known = [each.reward for each in of_step if each.reward is not None]
        [logged] = [each["reward"] for each in first.state.log_history if each.get("step") == step and "loss" in each]
        assert sum(known) / len(known) == pytest.approx(logged)
        for _, group in groupby(of_step, key=lambda each: each.prompt_group):
            rewards = {each.reward: each.advantage for each in group}
            assert rewards.pop(None, None) is None
            if len(rewards) == 2:
                low, high = (rewards[each] for each in sorted(rewards))
                assert low < 0 < high
                assert math.isclose(low, -high, abs_tol=1e-4)
    evaluated = [*recorded(folder, "eval")]
    assert {each.step for each in evaluated} == {STEPS}
    assert {each.row for each in evaluated} == {each.row_id for each in default_rows()}
    assert {each.advantage for each in evaluated} == {None}


def test_settings_name_record_and_replay(recorded_run, tmp_path):
    folder = str(recorded_run[1])
    config = TelemetryConfig(record=True, keep_samples=8, record_gib=0.5, record_filter="html.escape")
    assert config.record_clean()("<") == "&lt;"
    assert RewardConfig(replay=folder, replay_on_miss="nearest", replay_delays=True).asks_nobody
    assert not RewardConfig(replay=folder, replay_on_miss="live").asks_nobody
    assert RewardConfig(replay=folder).embeds_judge is False
    for wrong in ({"keep_samples": 0}, {"record_gib": 0}, {"record_filter": "math.pi"}, {"record_filter": "math.sin"}):
        with pytest.raises(ConfigError):
            TelemetryConfig(**wrong)
    for wrong in ({"replay": str(tmp_path / "nothing")}, {"replay": folder, "replay_on_miss": "guess"}):
        with pytest.raises(ConfigError):
            RewardConfig(**wrong)
