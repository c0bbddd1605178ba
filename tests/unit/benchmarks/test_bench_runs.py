"""Each bench runs, at tiny sizes, and its figures are what they say."""

import copy
import importlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.seconds import check_seconds
from torch.utils.tensorboard import SummaryWriter

from benchmarks import kl_control, policies, sharding
from salesrl_trl.data.sources import load_rows


@pytest.mark.parametrize(
    ("name", "updates", "rounds"), [pytest.param("kl", 2, 1, id="kl"), pytest.param("timing", 2, 2, id="timing")]
)
def test_a_bench_of_step_times_gives_the_median_of_its_rounds(name, updates, rounds, tmp_path, capsys, one_thread):
    out = tmp_path / "figures.json"
    words = ["--shape", "tiny", "--updates", str(updates), "--rounds", str(rounds), "--json", str(out)]
    importlib.import_module(f"benchmarks.{name}").main(words)
    figures = json.loads(out.read_text())
    assert len(figures["ratios"]) == rounds
    assert figures["ratio"] == statistics.median(figures["ratios"])
    assert f"ratio {figures['ratio']:.4f}" in capsys.readouterr().out
    if name == "kl":
        # one round is four blocks of two updates, of which the first is left out: two times for each arm
        assert {arm: [*map(len, each)] for arm, each in figures["seconds"].items()} == {"stock": [2], "branches": [2]}
        medians = figures["median_s"]
        assert figures["ratio"] == pytest.approx(medians["branches"] / medians["stock"])
    else:
        # measuring is some calls of Python: never nothing, and nowhere near a tenth of a second
        assert 0 < figures["own_s"] < 0.1
        assert figures["trace_bytes"] > 1000
        assert figures["mfu"] == {"perf/mfu_model": 0.0, "perf/mfu_step": 0.0}  # a CPU


ARMS = ("--arms", "stock", "exact", "lookahead_1", "floor")
AROUND_AN_ENGINE = {
    "pipeline": ("--device", "cpu", *ARMS, "--steps", "1", "--latency", "0.6", "0.3"),
    "functions": ("--forms", "sync", "--lookahead", "0", "2", "--rounds", "1", "--latency", "0.6"),
    "chains": ("--shape", "tiny", "--chains", "4", "--rounds", "1", "--batches", "2", "--latency", "0.2", "0.1"),
}
ONE_AFTER_ANOTHER = """
import importlib, json, sys
for name, words in json.loads(sys.argv[1]).items():
    importlib.import_module(f"benchmarks.{name}").main(words)
"""


@pytest.mark.bench
@pytest.mark.timeout(480)
def test_the_benches_around_an_engine_of_vllm(tmp_path):
    """In one process, not that of the tests: half of what each of them takes is the import of vLLM."""
    given = {name: [*words, "--json", str(tmp_path / name)] for name, words in AROUND_AN_ENGINE.items()}
    command = [sys.executable, "-c", ONE_AFTER_ANOTHER, json.dumps(given)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    check_rewards_that_nobody_waits_for_make_shorter_steps(json.loads((tmp_path / "pipeline").read_text()))
    check_a_function_called_beside_training_makes_shorter_steps(json.loads((tmp_path / "functions").read_text()))
    check_real_chains_ran_inside_and_beside_the_engines_process(json.loads((tmp_path / "chains").read_text()))
    for told in ("stock_sync", "lookahead_1", "4 chains inside the process", "4 chains beside the process"):
        assert told in done.stdout


def check_rewards_that_nobody_waits_for_make_shorter_steps(figures):
    assert figures["latency_s"] == [0.6, 0.3]
    stock, exact, ahead = (figures["arms"][name] for name in ("stock", "exact", "lookahead_1"))
    # two blocks of one step, and for a lookahead of one a block of two rounds of two
    assert [len(arm["step_s"]) for arm in (stock, exact, ahead)] == [2, 2, 4]
    assert [arm["reward_failures"] for arm in (stock, exact, ahead)] == [0, 0, 0]
    check_seconds(exact["step_s_median"], most=stock["step_s_median"])
    check_seconds(ahead["step_s_median"], most=exact["step_s_median"])
    check_seconds(figures["floor_s"], most=exact["step_s_median"])
    assert figures["floor_s"] > 0
    assert ahead["ratio"] == pytest.approx(ahead["step_s_mean"] / stock["step_s_mean"])
    assert stock["hidden"] < 0.1
    assert ahead["hidden"] > 0.5


def check_a_function_called_beside_training_makes_shorter_steps(figures):
    arms = figures["arms"]
    assert [*arms] == ["stock", "stock_sync", "sync/0", "sync/2"]
    assert [len(*arm["step_s"]) for arm in arms.values()] == [2, 2, 2, 6]
    assert [arm["failures"] for arm in arms.values()] == [0, 0, 0, 0]
    for name in ("stock_sync", "sync/0"):  # the same completions: the same rewards and losses as TRL's
        assert arms[name]["differences"]["reward"] == 0.0
        assert arms[name]["differences"]["loss"] < 1e-5
    check_seconds(arms["sync/2"]["mean_s"], most=0.75 * arms["stock"]["mean_s"])
    assert arms["sync/2"]["ratio"] == pytest.approx(arms["sync/2"]["mean_s"] / arms["stock"]["mean_s"])
    assert arms["stock"]["hidden"] is None
    assert arms["sync/0"]["hidden"] < 0.5 < arms["sync/2"]["hidden"]


def check_real_chains_ran_inside_and_beside_the_engines_process(figures):
    for arm in ("inside", "beside"):
        assert figures["arms"][arm]["failed"] == 0
        (block,) = figures["arms"][arm]["blocks"]
        assert block["ratio"] == pytest.approx(block["tokens_per_s_with"] / block["tokens_per_s_without"])
        assert block["chains_per_s"] > 0


# Fixed and controlled coefficients


def write_run(folder, kl):
    """A run whose first branch had 100 tokens in every step but the second one."""
    with SummaryWriter(folder / "runs") as writer:
        for step, value in enumerate(kl, start=1):
            tokens = 0.0 if step == 2 else 100.0
            if tokens:
                writer.add_scalar("train/kl/fairness", value, step)
            writer.add_scalar("train/kl/fairness_tokens", tokens, step)
            writer.add_scalar("train/beta/fairness", 0.1 * step, step)
    evaluations = [{"step": step, "reward": 0.3, "fairness": 0.4} for step in (0, len(kl))]
    (folder / "held_out.json").write_text(json.dumps(evaluations))


def test_a_finished_run_is_read_and_not_run_again(tmp_path, capsys, monkeypatch):
    band = '{"fairness": {"beta": 0.1, "low": 0.1, "high": 0.2}}'
    kl = {"none-1": [0.5] * 16, "packaged-1": [0.5] * 5 + [0.15] * 5 + [0.5] + [0.1] * 5}
    launched = []

    run = subprocess.run

    def launch(command, **settings):
        if "--output_dir" not in command:  # matplotlib looks for fonts
            return run(command, **settings)
        folder = Path(command[command.index("--output_dir") + 1])
        launched.append((folder.name, "fixed" in command))
        folder.mkdir()
        write_run(folder, kl[folder.name])
        return None

    monkeypatch.setattr(kl_control.subprocess, "run", launch)
    plot = tmp_path / "kl.svg"
    arguments = [str(tmp_path), "--seeds", "1", "--arms", "none", "packaged", "--branch_kl", band]
    kl_control.main(arguments)
    capsys.readouterr()
    kl_control.main([*arguments, "--plot", str(plot)])
    assert launched == [("none-1", True), ("packaged-1", False)]
    with pytest.raises(SystemExit, match="a run with other settings"):
        kl_control.main([*arguments, "--window", "20"])
    told = capsys.readouterr().out.splitlines()
    # windows of five steps: 0.5, 0.15, 0.18. The first third, so one window, is given to settling
    assert told[4] == "| packaged, seed 1 | 100% | 100% | 0 of 2 | 5 | 1.6 | 0.300 -> 0.300 (+0.000) | - |"
    assert told[5] == "| **none** | 0% | 0% | 2 of 2 | 15 | 1.6 | 0.300 -> 0.300 (+0.000) | - |"
    assert plot.stat().st_size > 10_000


def test_a_window_is_the_mean_over_tokens():
    steps = [(0.1, 300.0, 1.0), (0.5, 100.0, 1.0), (0.7, 0.0, 1.0), (0.7, 0.0, 1.0), (9.0, 1.0, 1.0)]
    # (0.1 x 300 + 0.5 x 100) / 400 = 0.2; no tokens; the last step fills no window
    assert kl_control.windows(steps, 2) == [pytest.approx(0.2), None]


# Two policies


def test_careful_actions_have_every_property_and_invented_ones_have_not():
    rows, records = load_rows("demo", "heldout", ("fairness", "hallucination"), 40), policies.demo_records(40)
    careful = [json.dumps(record["careful_action"]) for record in records]
    assert set(policies.shares(rows, records, careful).values()) == {1.0}
    invented = {
        "user_profile": "A 63-year-old Hui widow in Tibet",
        "rewritten_query": "zzz",
        "history_summary": "9999",
    }
    shares = policies.shares(rows, records, [json.dumps(invented)] * 40)
    assert shares.pop("valid action") == 1.0
    assert set(shares.values()) == {0.0}


def test_a_policy_is_as_good_as_itself(tiny, capsys, one_thread):
    policies.main([str(tiny), str(tiny), "--rows", "4", "--examples", "1"])
    table, example = capsys.readouterr().out.split("\n\n", 1)
    shares = [line.split()[-3:] for line in table.splitlines()]
    assert len(shares) == 6
    assert all(one == other for one, _, other in shares)
    before, after = example.split("\n  before: ")[1].rstrip("\n").split("\n  after:  ")
    assert before == after


def test_the_bench_of_memory_estimates_what_it_trains(tmp_path, capsys, one_thread):
    out = tmp_path / "figures.json"
    importlib.import_module("benchmarks.memory").main(["--shapes", "tiny", "--json", str(out)])
    lora, full, *shared = json.loads(out.read_text())["rows"]
    assert full["parts_gib"]["gradients"] > lora["parts_gib"]["gradients"] > 0
    assert [row["row"] for row in shared] == [f"{row['row']}, shared prompts" for row in (lora, full)]
    if not torch.cuda.is_available():
        assert "measures nothing" in capsys.readouterr().err


@pytest.mark.bench
def test_the_bench_of_sharding_compares_the_steps_and_the_saved_weights_of_two_launches(tiny, tmp_path, one_thread):
    sharding.main(["--worker", "--shape", "tiny", "--steps", "2", "--model", str(tiny), "--out", str(tmp_path)])
    one = json.loads((tmp_path / "figures.json").read_text())
    saved = tmp_path / "saved"
    assert set(sharding.differences(one, one, (saved, saved)).values()) == {0.0}
    other = copy.deepcopy(one)
    other["steps"][1]["loss"] += 0.5
    found = sharding.differences(one, other, (tiny, saved))
    assert found["loss"] == 0.5
    assert found["weights"] > 1e-5  # two steps at a rate of 1e-4, of which the last one is smaller
