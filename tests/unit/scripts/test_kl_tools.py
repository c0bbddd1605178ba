"""The two scripts of the branches' KL: the bench trains both arms alike, and the comparison reads what a run wrote."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture(scope="module")
def compare():
    spec = importlib.util.spec_from_file_location("compare_kl_control", SCRIPTS / "compare_kl_control.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_bench_trains_both_arms_and_gives_the_median_of_its_rounds(tmp_path):
    out = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPTS / "bench_kl.py"), "--shape", "tiny", "--updates", "2", "--rounds", "1"]
    done = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(out.read_text())
    # one round is four blocks of two updates, of which the first is left out: two times for each arm
    assert {arm: [len(times) for times in rounds] for arm, rounds in figures["seconds"].items()} == {
        "stock": [2],
        "branches": [2],
    }
    medians = figures["median_s"]
    assert figures["ratio"] == pytest.approx(medians["branches"] / medians["stock"])
    assert f"ratio {figures['ratio']:.4f}" in done.stdout


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


def test_a_finished_run_is_read_and_not_run_again(compare, tmp_path, capsys, monkeypatch):
    band = '{"fairness": {"beta": 0.1, "low": 0.1, "high": 0.2}}'
    kl = {"fixed-1": [0.5] * 8, "controlled-1": [0.5, 9.0, 0.5, 0.5, 0.15, 0.15, 0.1, 0.5]}
    launched = []

    run = subprocess.run

    def launch(command, **settings):
        if "--output_dir" not in command:  # matplotlib looks for fonts
            return run(command, **settings)
        folder = Path(command[command.index("--output_dir") + 1])
        launched.append((folder.name, command[command.index("--kl_control") + 1]))
        folder.mkdir()
        write_run(folder, kl[folder.name])
        return None

    monkeypatch.setattr(compare.subprocess, "run", launch)
    plot = tmp_path / "kl.svg"
    arguments = [str(tmp_path), "--seeds", "1", "--window", "2", "--branch_kl", band]
    compare.main(arguments)
    capsys.readouterr()
    compare.main([*arguments, "--plot", str(plot)])
    assert launched == [("fixed-1", "false"), ("controlled-1", "true")]
    with pytest.raises(SystemExit, match="a run with other settings"):
        compare.main([*arguments, "--steps", "20"])
    told = capsys.readouterr().out.splitlines()
    # windows of two steps: 0.5, 0.5, 0.15, 0.3. The first 0.3 x 4, so one, is given to settling: one of three in band
    assert told[1].startswith("controlled seed 1: fairness 33% in band, beta 0.1 -> 0.8, reward 0.400 -> 0.400;")
    assert told[2] == "fixed: fairness in band 0% of the windows after settling"
    assert plot.stat().st_size > 10_000


def test_a_window_is_the_mean_over_tokens(compare):
    steps = [(0.1, 300.0, 1.0), (0.5, 100.0, 1.0), (0.7, 0.0, 1.0), (0.7, 0.0, 1.0), (9.0, 1.0, 1.0)]
    # (0.1 x 300 + 0.5 x 100) / 400 = 0.2; no tokens; the last step fills no window
    assert compare.windows(steps, 2) == [pytest.approx(0.2), None]
