"""The bench on a real model: its measures by hand, and a tiny arm of it."""

import json

import pytest

from benchmarks import real_model
from salesrl_trl.errors import ConfigError


def run(rewards, seconds=1.0, held_out=(0.1, 0.5)):
    log = [{"reward": reward, "at_s": seconds * (place + 1)} for place, reward in enumerate(rewards)]
    return {"log": log, "held_out": [*held_out]}


def test_measures_by_hand():
    # windows of ten: 0.2, 0.6, 0.3, 0.5; the deepest dip is 0.3 below 0.6
    rewards = [0.2] * 10 + [0.6] * 10 + [0.3] * 10 + [0.5] * 10
    found = real_model.measures(run(rewards, seconds=2.0), until_s=40.0)
    expected = {"area": 0.4, "last": 0.4, "dip": 0.3, "held_out": 0.5, "gain": 0.4, "at_seconds": 0.6, "step_s": 2.0}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert real_model.measures(run(rewards), until_s=40.0)["at_seconds"] == pytest.approx(0.5)


def test_the_mean_over_seconds_and_the_windows_in_band_by_hand():
    # two steps of 10 s: 0 until the first ends, 0.4 for 10 s, and 0.8 for the 5 s that are left
    log = [{"reward": 0.4, "at_s": 10.0}, {"reward": 0.8, "at_s": 20.0}, {"reward": 1.0, "at_s": 30.0}]
    assert real_model.measures({"log": log, "held_out": [0, 1]}, 25.0)["area_seconds"] == pytest.approx((4 + 4) / 25)
    # windows of five steps: of three, the second is within 0.02 to 0.06, and the third beyond by its longer steps
    for place, kl in enumerate([0.5] * 5 + [0.01, 0.07] * 2 + [0.04] + [0.03] * 4 + [0.4]):
        log += [{"reward": 1.0, "at_s": 40.0, "kl/fairness": kl, "kl/fairness_tokens": 10.0 + 90.0 * (place == 14)}]
    found = real_model.measures({"log": log[3:], "held_out": [0, 1]}, 25.0)
    assert found["in_band fairness"] == 0.5 and "in_band hallucination" not in found
    log[-1] |= {"kl/fairness_low": 0.02, "kl/fairness_high": 0.3}  # the run's own band: the third's mean is 0.294
    assert real_model.measures({"log": log[3:], "held_out": [0, 1]}, 25.0)["in_band fairness"] == 1.0


def test_an_arm_joins_settings_and_is_compared_with_its_own_rate():
    arm = "ahead_2+geometric+lr_5e-6"
    assert real_model.settings_of(arm) == {
        "rollout_lookahead": 2, "rollout_correction": {"reject": {"seq_mean_k1": [0.98, 1.02]}}, "learning_rate": 5e-6,
    }  # fmt: skip
    assert real_model.counterpart(arm) == "on_policy+lr_5e-6"
    with pytest.raises(SystemExit, match="unknown part ahead_3"):
        real_model.settings_of("ahead_3")
    assert real_model.counterpart("stock+lr_5e-6") == "on_policy+lr_5e-6"
    for other in ("stock", "ahead_2+drawn"):
        with pytest.raises(SystemExit, match="the task sales has no arm"):
            real_model.sales_settings(other)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arms", "on_policy", "ahead_3"], "unknown part ahead_3"),
        (
            ["--arms", "on_policy", "ahead_1+bands", "--tasks", "dual", "words"],
            "has bands for fairness, hallucination",
        ),
        (["--arms", "on_policy+lora", "odd"], "rollout_correction.weights"),
        (["--arms", "stock", "--samples", "7"], "--samples 7"),
        (["--model", "tiny", "--tasks", "sales", "--judge", "self"], "the built-in policy's context"),
        (["--arms", "stock", "--tasks", "sums", "sales"], "the task sales has no arm"),
        (["--arms", "odd", "--tasks", "sales"], "rollout_correction.weights"),
    ],
)
def test_what_would_end_a_run_minutes_later_is_refused_before_the_first_one(words, message, tmp_path, monkeypatch):
    monkeypatch.setitem(real_model.PARTS, "odd", {"rollout_correction": {"weights": "odd"}})
    monkeypatch.setattr(real_model, "run_all", None)  # nothing is started
    with pytest.raises((SystemExit, ConfigError), match=message):
        real_model.main([str(tmp_path / "out"), "--model", str(tmp_path), *words])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("task", real_model.TASKS)
def test_every_row_has_its_truth_and_held_out_rows_are_others(task):
    train, held_out = (real_model.TASKS[task](part) for part in ("train", "heldout"))
    assert all(row["answer"] and row["prompt"][0]["content"] for row in train)
    prompts = [{row["prompt"][0]["content"] for row in rows} for rows in (train, held_out)]
    assert len(held_out) >= 16 and len(prompts[1] - prompts[0]) > 0.5 * len(prompts[1])


def test_a_report_has_intervals_and_paired_differences(tmp_path, capsys):
    for arm, worse in (("on_policy", 0.0), ("ahead_2", 0.1)):
        for seed in (1, 2, 3):
            file = real_model.file_of(tmp_path, "words", arm, seed)
            file.parent.mkdir(parents=True, exist_ok=True)
            # seeds differ by 0.1, arms always by 0.1 and a bit
            file.write_text(json.dumps(run([0.1 * seed - worse * (1 + 0.01 * seed) + 0.2] * 20)))
    real_model.main([str(tmp_path), "--report", "--arms", "on_policy", "ahead_2", "--seeds", "1", "2", "3"])
    printed = capsys.readouterr().out
    # 0.3, 0.4, 0.5: 4.303 * 0.1 / sqrt(3) = 0.248
    assert "| on_policy | 3 | 0.400 ± 0.248 |" in printed
    # -0.101, -0.102, -0.103: 4.303 * 0.001 / sqrt(3) = 0.002
    assert "| ahead_2 | 3 | -0.102 ± 0.002 * |" in printed
    assert (tmp_path / "words.svg").is_file() and (tmp_path / "report.json").is_file()


@pytest.mark.bench
def test_a_tiny_arm_runs_resumes_and_is_reported(tmp_path, capsys):
    words = [str(tmp_path), "--model", "tiny", "--tasks", "sums", "--arms", "on_policy", "ahead_2", "--seeds", "1",
             "--steps", "3", "--at_once", "2"]  # fmt: skip
    real_model.main(words)
    assert "all ran" in capsys.readouterr().out
    kept = real_model.file_of(tmp_path, "sums", "ahead_2", 1)
    before = kept.stat().st_mtime_ns
    real_model.main(words)
    assert kept.stat().st_mtime_ns == before
    told = json.loads(kept.read_text())
    assert len(told["log"]) == 3 and all(0 <= entry["reward"] <= 1 for entry in told["log"])
    assert [entry["rollout/staleness"] for entry in told["log"]] == [0, 1, 2]


@pytest.mark.bench
def test_runs_of_equal_seconds_end_in_time_and_both_bands_are_measured(tmp_path):
    words = [str(tmp_path), "--model", "tiny", "--seeds", "1", "--held_out", "8"]
    real_model.main([*words, "--tasks", "sums", "--arms", "ahead_2", "--seconds", "6", "--reward_s", "0.2"])
    log = json.loads(real_model.file_of(tmp_path, "sums", "ahead_2", 1).read_text())["log"]
    assert 1 <= len(log) < 100 and log[-1]["at_s"] >= 6
    real_model.main([*words, "--tasks", "dual", "--arms", "ahead_1+bands", "--steps", "10"])
    told = json.loads((tmp_path / "report.json").read_text())["tasks"]["dual"]["ahead_1+bands"]["1"]
    assert all(told[f"in_band {branch}"] in (0, 1) for branch in real_model.BANDS)  # one window counts


@pytest.mark.bench
def test_arms_of_other_trainers_and_draws_run_and_count_the_same_calls(tmp_path):
    arms = ("stock", "remembered", "refill")
    real_model.main([str(tmp_path), "--model", "tiny", "--tasks", "digits", "--arms", *arms, "--seeds", "1",
                     "--steps", "2", "--rows", "64", "--evaluations", "2"])  # fmt: skip
    told = {arm: json.loads(real_model.file_of(tmp_path, "digits", arm, 1).read_text()) for arm in arms}
    calls = {arm: each["log"][-1]["calls"] for arm, each in told.items()}
    assert calls["stock"] == calls["remembered"] == 2 * 32 <= calls["refill"]
    assert all(0 <= reward <= 1 for each in told.values() for reward in each["held_out"])
    assert [len(each["held_out"]) for each in told.values()][:2] == [3, 3]  # before, in the middle, after
