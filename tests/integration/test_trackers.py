"""What each tracker of `report_to` holds after a run that reports to all of them: one run for all tests here.

As a program it is that run, as trackers keep theirs in globals. It writes OUT/found.json: of each tracker the figures
by TensorBoard's tag and step, the settings, and the tables of completions by step.
"""

import json
import os
import struct
import subprocess
import sys
from collections import defaultdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

if __name__ == "__main__":
    from trl import import_utils

    import_utils.is_vllm_available = lambda *_, **__: False  # an import of 4 s of CPU

KEY = "sk-planted-0123456789"
"""Given to the run in every way that a setting may hold a key."""
TRACKERS = ("wandb", "mlflow", "trackio", "swanlab")
STEPS = 3
SUMMARY = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")
"""Figures at the end of training. transformers hands them to trackers in other ways, and to trackio not at all."""
LOOPBACK = ("127.0.0.1", "localhost", "::1", None)
COLUMNS = {"step", "prompt", "completion", "branch", "sales", "advantage", "outcome", "reason", "judge"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, policy_path):
    if not any(map(installed, TRACKERS)):
        pytest.skip("no tracker is installed: requirements/trackers.txt says how")
    out = tmp_path_factory.mktemp("tracked")
    path = os.pathsep.join((*map(str, Path(__file__).parents[1:3]), *filter(None, sys.path)))
    done = subprocess.run(
        [sys.executable, __file__, str(policy_path), str(out)],
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


def watch_network():
    """The hosts beyond this machine that Python code connects to or looks up from here on."""
    strangers = []

    def hook(event, given):
        if event in ("socket.connect", "socket.getaddrinfo"):
            address = given[1] if event == "socket.connect" else given[0]
            host = address[0] if isinstance(address, tuple) else address
            if not (isinstance(host, str) and host.startswith("/")) and host not in LOOPBACK:
                strangers.append(str(host))

    sys.addaudithook(hook)
    return strangers


def set_offline(out):
    os.environ |= {
        "WANDB_MODE": "offline", "WANDB_DIR": str(out), "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"sqlite:///{out}/mlflow.db", "MLFLOW_DISABLE_TELEMETRY": "true",
        "TRACKIO_DIR": str(out / "trackio"),
        "SWANLAB_MODE": "offline", "SWANLAB_LOG_DIR": str(out / "swanlog"),
        "JUDGE_KEY": KEY,
    }  # fmt: skip


def train(policy, out, trackers):
    from pytest_httpserver import HTTPServer
    from support.loopback import BAD, Services, action
    from support.scripted import build_trainer, default_rows, loopback_reward

    from salesrl_trl.launch.plan import settings_beside_the_trainers
    from salesrl_trl.launch.recipes import FULL
    from salesrl_trl.launch.settings import parse

    address = "http://127.0.0.1:9/v1"
    judge = {"name": "one", "base_url": address, "model": "m", "api_key_env": "JUDGE_KEY",
             "extra_body": {"api_key": KEY}}  # fmt: skip
    arguments = ["--rag_base_url", address, "--judge_providers", json.dumps([judge]), "--use_cpu", "true",
                 "--output_dir", str(out / "recipe"), "--use_vllm", "false", "--rollout_lookahead", "0"]  # fmt: skip
    beside = settings_beside_the_trainers(parse(arguments, FULL))
    rows, texts = default_rows(), tuple(text for n in range(99) for text in (action(query=f"q{n}"), BAD))
    with HTTPServer(host="127.0.0.1", port=0, threaded=True) as server:
        reward = loopback_reward(Services(server), rows, providers=[{"name": "judge", "api_key": KEY}])
        trainer = build_trainer(
            policy, reward, texts, rows, out / "run", report_to=["tensorboard", *trackers], log_completions=True,
            max_steps=STEPS, hub_token=KEY, branch_kl=json.dumps({"fairness": {"beta": 0.1}}),
        )  # fmt: skip
        trainer.args.beside = beside
        trainer.train()
        trainer.evaluate()
        trainer.finish()


def read_tensorboard(out):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    figures = defaultdict(dict)
    for file in sorted(out.glob("run/runs/*/events.*")):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            figures[tag] |= {each.step: each.value for each in events.Scalars(tag)}
    return {"figures": figures}


def read_wandb(out):
    from wandb.proto import wandb_internal_pb2

    data, at, part = next(out.glob("wandb/offline-run-*/*.wandb")).read_bytes(), 7, b""
    figures, settings, tables = defaultdict(dict), {}, {}
    while at < len(data):  # LevelDB's format of logs: blocks of 32 KiB, of parts with a head of 7 bytes
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        part, at = part + data[at + 7 : at + 7 + size], at + 7 + size
        if kind not in (1, 4):  # neither whole nor the last part
            continue
        record, part = wandb_internal_pb2.Record.FromString(part), b""
        for each in record.config.update:
            settings[each.key or ".".join(each.nested_key)] = json.loads(each.value_json)
        row = {each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in record.history.item}
        for tag, value in row.items():
            if tag.startswith(("train/", "eval/")) and isinstance(value, int | float):
                figures[tag][row["train/global_step"]] = value
        if "completions/path" in row:
            files = next(out.glob("wandb/offline-run-*/files"))
            table = json.loads((files / row["completions/path"]).read_text("utf-8"))
            rows = [dict(zip(table["columns"], each, strict=True)) for each in table["data"]]
            tables[f"train {rows[0]['step']}"] = rows
        for each in record.summary.update:
            if each.key in SUMMARY or "/".join(each.nested_key) in SUMMARY:
                figures[f"train/{each.key or each.nested_key[0]}"][STEPS] = json.loads(each.value_json)
    return {"figures": figures, "settings": settings, "tables": tables}


def read_mlflow(out):
    import mlflow

    client = mlflow.tracking.MlflowClient(f"sqlite:///{out}/mlflow.db")
    [run] = client.search_runs(["0"])
    assert run.info.status == "FINISHED"
    figures = {}
    for name in run.data.metrics:
        if name.startswith("profiling/"):  # TRL's own, which TensorBoard does not get
            continue
        tag = f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
        figures[tag] = {each.step: each.value for each in client.get_metric_history(run.info.run_id, name)}
    return {"figures": figures, "settings": dict(run.data.params), "tables": {}}


def read_trackio(out):
    from trackio.sqlite_storage import SQLiteStorage

    [run] = SQLiteStorage.get_runs("huggingface")
    figures, tables = defaultdict(dict), {}
    for row in SQLiteStorage.get_logs("huggingface", run):
        for tag, value in row.items():
            if tag.startswith(("train/", "eval/")) and isinstance(value, int | float):
                figures[tag][row["train/global_step"]] = value
        if rows := row.get("completions", {}).get("_value"):
            tables[f"train {rows[0]['step']}"] = rows
    return {"figures": figures, "settings": SQLiteStorage.get_run_config("huggingface", run), "tables": tables}


def read_swanlab(out):
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    [folder] = out.glob("swanlog/run-*")
    figures, reader = defaultdict(dict), DataStoreReader()
    reader.open(next(folder.glob("*.swanlab")))
    for scalar in (record.scalar for record in map(Record.FromString, reader) if record.HasField("scalar")):
        if not scalar.key.startswith("__swanlab__"):  # of the machine, in a run that lasts
            figures[scalar.key.replace("single_value/", "train/")][scalar.step] = scalar.value.number
    text = yaml.safe_load((folder / "files/config.yaml").read_text("utf-8"))
    settings = {name: each["value"] if isinstance(each, dict) else each for name, each in text.items()}
    return {"figures": figures, "settings": settings, "tables": {}}


def main(policy, out):
    out, strangers = Path(out).resolve(), watch_network()
    set_offline(out)
    os.chdir(out)  # where MLflow puts its artifacts
    trackers = [name for name in TRACKERS if find_spec(name) is not None]
    train(policy, out, trackers)
    for name in {"wandb", "swanlab"}.intersection(trackers):  # as at the end of a process
        import_module(name).finish()
    found = {name: globals()[f"read_{name}"](out) for name in ("tensorboard", *trackers)}
    (out / "found.json").write_text(json.dumps({"trackers": found, "strangers": strangers}), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
