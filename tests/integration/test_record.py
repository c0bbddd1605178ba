"""A run that is recorded, and runs whose rewards come from its record."""

import math
import re
import socket
from contextlib import closing
from itertools import groupby

import pytest
from pytest_httpserver import HTTPServer
from support.loopback import ACTION, BAD, Services, action
from support.scripted import build_trainer, default_rows, loopback_reward

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.demo.packaged import FILE, PROMPT_STYLE
from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.assembly import open_reward
from salesrl_trl.launch.checks.reward import check_stand_ins
from salesrl_trl.launch.data.sources import build_dataset, load_rows
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.record.reader import digest_of, open_record, recorded
from salesrl_trl.trainer import SalesGRPOTrainer
from scripts import make_demo_cassette

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = (ACTION, BAD, action("refund"), action("Python"), action("price"))
STEPS = 4


@pytest.fixture(scope="module")
def recorded_run(tiny, tmp_path_factory):
    """A run with a service that fails for one kind of action, and its folder."""
    folder, rows = tmp_path_factory.mktemp("recorded"), default_rows()
    with HTTPServer(host="127.0.0.1", port=0, threaded=True) as server:
        services = Services(server)

        def answer(request):
            return (503, "busy") if request.json["rewritten_query"] == "refund" else services.answers["8b"][0]

        services.functions["8b"] = answer
        reward = loopback_reward(services, rows, records=True)
        trainer = build_trainer(tiny, reward, TEXTS, rows, folder, max_steps=STEPS, record=True)
        trainer.train()
        trainer.evaluate()
        trainer.finish()
    return trainer, folder


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
    given = {"output_dir": str(tmp_path), "use_cpu": True}
    config = SalesGRPOConfig(**given, record={"gib": 0.5, "filter": "html.escape"})
    gib, clean, _ = config.parsed_record()
    assert (gib, clean("<")) == (0.5, "&lt;")
    assert RewardConfig(replay={"run": folder, "on_miss": "nearest", "delays": True}).asks_nobody
    assert not RewardConfig(replay=f'{{"run": "{folder}", "on_miss": "live"}}').asks_nobody
    assert RewardConfig(replay=folder).embeds_judge is False
    for wrong in ({"gib": 0}, {"filter": "math.pi"}):
        with pytest.raises(ConfigError):
            SalesGRPOConfig(**given, record=wrong)
    assert [RewardConfig(replay=run).parsed_replay().on_miss for run in (folder, "demo")] == ["fail", "nearest"]
    assert RewardConfig(replay={"run": "demo", "on_miss": "fail"}).parsed_replay().on_miss == "fail"
    with pytest.raises(ConfigError, match=r"not for mine.jsonl"):
        check_stand_ins(RewardConfig(replay="demo"), ["fairness"], "mine.jsonl")


def test_the_packaged_record_trains_the_packaged_policy_without_network(policy_path, tmp_path, monkeypatch, caplog):
    def refused(*_, **__):
        raise AssertionError("a socket was used")

    for name in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, name, refused)
    caplog.set_level("INFO", "salesrl_trl.record.replay")
    rows = load_rows("demo", "train", ("fairness", "hallucination"))
    config = SalesGRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, max_steps=2, logging_steps=1, per_device_train_batch_size=32,
        num_generations=8, max_completion_length=48, report_to="none", save_strategy="no", disable_tqdm=True,
        held_out_eval=False, gradient_checkpointing=False, record=True,
    )  # fmt: skip
    with open_reward(RewardConfig(replay="demo"), config, rows) as reward:
        trainer = SalesGRPOTrainer(str(policy_path), reward, config, build_dataset(rows, PROMPT_STYLE))
        trainer.train()
        trainer.finish()
    assert [each["grad_norm"] > 0 for each in trainer.state.log_history if "loss" in each] == [True] * 2
    found = [*recorded(tmp_path, "train")]
    assert {each.branch for each in found} == {"fairness", "hallucination"}
    assert None not in {each.reward for each in found}
    for branch in ("fairness", "hallucination"):
        of_branch = [each for each in found if each.branch == branch]
        assert len({each.reward for each in of_branch}) > 3
        assert min(each.advantage for each in of_branch) < 0 < max(each.advantage for each in of_branch)
    assert re.search(r"\[Replay\] 64 completions: \d+ as recorded, \d+ of the nearest text", caplog.text)


def test_the_packaged_record_is_of_the_demo_as_it_is():
    again = "the demo has changed: run scripts/make_demo_cassette.py"
    rows = [row for split in ("train", "heldout") for row in load_rows("demo", split, ("fairness", "hallucination"))]
    prompts = dict(zip((row.row_id for row in rows), build_dataset(rows, PROMPT_STYLE)["prompt"], strict=True))
    found = [*recorded(FILE)]
    assert {each.row for each in found} == prompts.keys(), again
    assert [each.digest for each in found] == [digest_of(prompts[each.row], each.text) for each in found], again
    with closing(open_record(FILE)) as file:
        assert dict(file.execute("SELECT * FROM meta")) == {"documents": make_demo_cassette.documents()}, again
    assert FILE.stat().st_size < 1_000_000
