"""What each tracker of `report_to` holds after a run that reports to all of them: one run for all tests here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.tracked_run import KEY, STEPS, SUMMARY, TRACKERS

RUN = Path(__file__).parents[1] / "support" / "tracked_run.py"
COLUMNS = {"step", "prompt", "completion", "branch", "sales", "advantage", "outcome", "reason", "judge"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, policy_path):
    if not any(map(installed, TRACKERS)):
        pytest.skip("no tracker is installed: requirements/trackers.txt says how")
    out = tmp_path_factory.mktemp("tracked")
    path = os.pathsep.join((str(RUN.parents[1]), str(RUN.parents[2]), *filter(None, sys.path)))
    done = subprocess.run(
        [sys.executable, str(RUN), str(policy_path), str(out)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "ERROR" not in done.stdout + done.stderr  # SwanLab prints one for each figure without a value
    return out


@pytest.fixture(scope="module")
def found(folder):
    return json.loads((folder / "found.json").read_text("utf-8"))


@pytest.fixture(params=TRACKERS)
def tracker(request, found):
    if request.param not in found["trackers"]:
        pytest.skip(f"{request.param} is not installed")
    return request.param


def installed(name):
    return any((Path(path) / name).is_dir() for path in sys.path)


def test_figures_are_tensorboards(found, tracker):
    expected, got = (found["trackers"][name]["figures"] for name in ("tensorboard", tracker))
    if tracker == "trackio":  # transformers leaves them out
        expected = {tag: steps for tag, steps in expected.items() if tag.removeprefix("train/") not in SUMMARY}
    assert got.keys() - {"train/global_step"} == expected.keys()
    for tag, steps in expected.items():  # TensorBoard has 32 bits
        assert got[tag] == pytest.approx(steps, rel=1e-6, abs=1e-9), tag
    assert [*expected["train/loss"]] == ["1", "2", "3"]
    assert "eval/reward" in expected  # which comes after training
    assert expected.keys() > {"train/kl/fairness", "train/reward/fairness", "train/time/step_s"}


def test_settings_of_the_trainer_and_of_the_reward(found, tracker):
    settings = {name: str(value) for name, value in found["trackers"][tracker]["settings"].items()}
    assert settings["max_steps"] == str(STEPS)
    assert settings["branches"] == "['fairness', 'hallucination']"
    assert "beta" in settings["branch_kl"]
    assert "http://127.0.0.1:9/v1" in settings["reward.rag"]
    assert '"base_url": "http://127.0.0.1:9/v1"' in settings["reward.judge_providers"]


def test_tables_of_completions(found, tracker):
    if tracker in ("mlflow", "swanlab"):
        pytest.skip(f"TRL hands {tracker} no tables")
    tables = found["trackers"][tracker]["tables"]
    assert {f"train {step}" for step in range(1, STEPS + 1)} <= tables.keys()
    for rows in tables.values():
        assert rows
        assert all(row.keys() >= COLUMNS for row in rows)
    first = tables["train 1"]
    assert [row["outcome"] for row in first] == ["ok", "invalid_action"] * 2
    assert [row["reason"] for row in first] == ["", "not_json"] * 2
    assert {row["branch"] for row in first} <= {"fairness", "hallucination"}
    assert "rewritten_query" in str(first[0]["completion"])
    assert "What does Python cost?" in str(first[0]["prompt"])
    assert [float(row["sales"]) for row in first] == [0.75, 0.0] * 2
    assert float(first[0]["advantage"]) > 0 > float(first[1]["advantage"])


def test_no_key_is_in_any_file_and_nothing_left_the_machine(folder, found):
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > len(TRACKERS)
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert found["strangers"] == []
