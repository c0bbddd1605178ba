"""A run's record in its folder: it repeats the run, holds no key, is compared with another one, and says its end."""

import contextlib
import dataclasses
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import yaml

from salesrl_trl.config.keys import is_secret
from salesrl_trl.ground.own_code import PACKAGE
from salesrl_trl.launch import env, signals, train
from salesrl_trl.launch.run_record import differences, has_finished, settings_text, write_record
from salesrl_trl.launch.settings import parse
from salesrl_trl.names import RUN_FILE, SETTINGS_FILE

ROOT = Path(__file__).parents[3]
SETTINGS_OF_RUNS = {
    "full": ("full.yaml", []),
    "fast_load": ("fast_load.yaml", []),
    "presets": ("full.yaml", ["--preset", "24gb", "fast_rollout", "--temperature", "0.9"]),
    "named model": ("full.yaml", ["--model_name_or_path", "DIR", "--beta", "0.1", "--branch_kl", "{}"]),
    "lists and structures": (
        "debug.yaml",
        ["--branches", "tone", "--beta", "0", "--branch_kl", '{"tone": {"beta": 1}}', "--no_warm_up_services"],
    ),
}


def settings(config):
    kinds = (config.data, config.reward, config.telemetry, config.training, config.model)
    return {field.name: getattr(kind, field.name) for kind in kinds for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(("name", "argv"), SETTINGS_OF_RUNS.values(), ids=SETTINGS_OF_RUNS)
def test_the_settings_of_a_run_repeat_it(name, argv, tmp_path):
    recipe = ROOT / "recipes" / name
    first = parse([*argv, "--output_dir", str(tmp_path)], recipe)
    kept = tmp_path / SETTINGS_FILE
    kept.write_text(settings_text(first.recipe), encoding="utf-8")
    again = parse(["--config", str(kept)], None)
    assert settings(again) == settings(first)
    assert yaml.safe_load(kept.read_text()) == yaml.safe_load(settings_text(again.recipe))
    assert yaml.safe_load(kept.read_text()).get("env") == yaml.safe_load(recipe.read_text()).get("env")


def record(folder, argv, environment=None):
    folder.mkdir()
    recipe = parse([*argv, "--output_dir", "runs/same"], ROOT / "recipes/debug.yaml").recipe
    recipe["env"] |= environment or {}
    write_record(folder, recipe, ["recipes/debug.py", *argv], processes=1)
    return folder


def test_two_runs_differ_in_what_was_changed_and_in_nothing_else(tmp_path, capsys):
    one, same = record(tmp_path / "one", []), record(tmp_path / "same", [])
    assert not any(differences(one, same).values())
    write_record(same, {}, ["recipes/debug.py"], processes=1)  # another start in the same folder
    assert (same / "config-1.yaml").read_text() == (one / SETTINGS_FILE).read_text()
    for name in ("config-1.yaml", "run-1.json"):
        (same / name).rename(same / name.replace("-1", ""))
    argv = ["--learning_rate", "0.5", "--branch_kl", '{"fairness": {"beta": 0.2, "low": 0.1, "high": 0.3}}']
    other = record(tmp_path / "other", argv)
    run = json.loads((other / RUN_FILE).read_text())
    run["versions"]["trl"] = "0"
    (other / RUN_FILE).write_text(json.dumps(run))
    found = differences(one, other)
    assert found["settings"] == {
        "learning_rate": (0.001, 0.5),
        "branch_kl.fairness.beta": (0.05, 0.2),
        **{f"branch_kl.hallucination.{name}": (value, "(none)") for name, value in
           {"beta": 0.05, "low": 0.1, "high": 0.3}.items()},
    }  # fmt: skip
    assert [*found["versions"], *found["code"], *found["command"]] == ["trl", "command"]
    assert env.main(["--diff", str(one), str(same)]) == 0
    assert env.main(["--diff", str(one), str(other)]) == 1
    assert "settings: learning_rate: 0.001 -> 0.5" in capsys.readouterr().out
    assert env.main(["--diff", str(one), str(tmp_path)]) == 2
    assert "Expected a run's `output_dir`" in capsys.readouterr().err


def test_files_of_one_start_keep_one_number_although_a_start_was_cut_off_between_them(tmp_path):
    for number in range(4):
        write_record(tmp_path, {"seed": number}, ["recipes/debug.py", f"--seed={number}"], processes=1)
        if number == 1:
            (tmp_path / RUN_FILE).unlink()  # as if the second start had been killed here
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "config-1.yaml", "config-2.yaml", "config-3.yaml", "config.yaml", "run-1.json", "run-3.json", "run.json"
    ]  # fmt: skip
    for number in (1, 3):
        assert yaml.safe_load((tmp_path / f"config-{number}.yaml").read_text()) == {"seed": number - 1}
        assert json.loads((tmp_path / f"run-{number}.json").read_text())["command"][1] == f"--seed={number - 1}"


def test_no_key_is_written(tmp_path):
    argv = ["--hub_token", "secret-1", "--vllm_engine_kwargs", '{"hf_token": "secret-2", "seed": 1}']
    argv += ["--hub-token=secret-3", "--hub_model_id", "https://me:secret-4@hub/a"]
    argv += ["--generation_kwargs", '{"extra": {"accessToken": "secret-a", "headers": {"x-api-key": "secret-b"}}}']
    argv += ["--run_name", "http://hub/a?part=1&accessToken=secret-c#b"]
    environment = {"OPENAI_API_KEY": "secret-5", "OPENAI_API_KEY_2": "secret-6"}
    environment |= {"HTTPS_PROXY": "http://me:secret-7@p:1"}
    environment |= {"AUTHORIZATION": "Bearer secret-8", "MYSQL_PWD": "secret-9", "SOME_KEY": ["secret-10"]}
    folder = record(tmp_path / "run", argv, environment)
    texts = (folder / SETTINGS_FILE).read_text() + (folder / RUN_FILE).read_text()
    logged = parse(argv, ROOT / "recipes/debug.yaml").training.to_json_string()  # as TensorBoard shows it
    assert '"max_steps"' in logged and "secret" not in logged
    assert "secret" not in texts
    assert "OPENAI_API_KEY" not in texts
    kept = yaml.safe_load((folder / SETTINGS_FILE).read_text())
    assert json.loads(kept["vllm_engine_kwargs"]) == {"seed": 1}
    assert kept["run_name"] == "http://hub/a?part=1&accessToken=***#b"
    assert (kept["env"]["HTTPS_PROXY"], kept["hub_model_id"]) == ("http://***@p:1", "https://***@hub/a")


def test_a_key_is_known_by_the_last_words_of_its_name():
    keys = "accessToken apiKey APIKey apikey accesstoken clientSecret dbPassword2 bearer Bearer x-api-key X-API-Key"
    others = "max_tokens maxTokens eos_token monkey bypass judge_api_key_env keyboard"
    assert all(map(is_secret, [*keys.split(), "Set-Cookie", "api_keys", "OPENAI_API_KEY_2"]))
    assert not any(map(is_secret, [*others.split(), ""]))


def test_code_and_versions_are_shown(capsys):
    assert env.main([]) == 0
    shown = capsys.readouterr().out
    assert env.main(["--diff", "a", "b", "--hub_token", "secret"]) == 2
    refused = capsys.readouterr().err
    assert "`--diff` and `--has` accept no settings" in refused and "secret" not in refused
    assert str(PACKAGE) in shown and "NOT MET" not in shown


def test_a_signal_after_the_last_step_lets_the_run_end_as_complete(tmp_path, monkeypatch):
    """A slow tracker's upload, for example, is no reason to call the run stopped."""
    config = parse(["--output_dir", str(tmp_path)], ROOT / "recipes/debug.yaml")
    trainer = MagicMock(finish=lambda: signal.raise_signal(signal.SIGTERM))
    trainer.state.global_step = 4
    for name in ("build_instruments", "take_policy", "RewardLoop", "_train"):
        monkeypatch.setattr(train, name, MagicMock())
    monkeypatch.setattr(train, "open_reward", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(train, "build_trainer", lambda *_: trainer)
    monkeypatch.setattr(signals, "_asked", signals._SignalAsked())
    monkeypatch.setattr(signals, "_exit_in_time", lambda: None)
    before = {number: signal.getsignal(number) for number in signals.CAUGHT}
    try:
        train.run(SimpleNamespace(config=config, rows=[], reward=None, notes=[]), MagicMock(), MagicMock())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert signals._asked.reason == "SIGTERM"
    assert has_finished(config.training)
