"""Fixed KL coefficients beside controlled ones, in real training of the small policy: runs, figures, plot.

    .venv/bin/python -m benchmarks.kl_control OUT_DIR [--seeds 1 2 3] [--plot docs/kl_control.svg]
        [--steps 160] [--window 5] [--learning_rate 1e-3] [--branch_kl JSON] [-- more recipe settings]

Runs the debug recipe for each arm and seed. A run that is complete in OUT_DIR is not run again.
Prints for each branch:

- the share of windows whose mean KL lies in the branch's band, after the first 30 % of a run;
- the reward before and after.

The plot needs matplotlib (the `plots` extra). It shows the KL of each window with its band, and the coefficients.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from salesrl_trl.names import HELD_OUT_FILE, beta_of, kl_of

ROOT = Path(__file__).parents[1]
ARMS = ("fixed", "controlled")
SETTLING = 0.3
"""Share of a run in which a coefficient may look for its value. Its windows are not counted."""
COLOURS = {"fixed": "#c05020", "controlled": "#2060b0"}


def train(arm: str, seed: int, out: Path, settings: Sequence[str]) -> None:
    """Run the debug recipe, unless the same run with the same settings is in the folder."""
    kept = out.with_suffix(".json")
    if (out / HELD_OUT_FILE).is_file():
        if json.loads(kept.read_text()) != list(settings):
            raise SystemExit(f"{out} holds a run with other settings. Remove it, or name another folder.")
        return
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/debug.yaml"]
    command += ["recipes/debug.py", "--output_dir", str(out), "--seed", str(seed)]
    command += ["--kl_control", str(arm == "controlled").lower(), *settings]
    out.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(list(settings)))
    with out.with_suffix(".log").open("w") as log:
        subprocess.run(command, cwd=ROOT, check=True, stdout=log, stderr=subprocess.STDOUT)


def read(out: Path, branches: Sequence[str]) -> dict[str, Any]:
    """A run's figures: for each branch and step the KL, its tokens and the coefficient; the held-out evaluations."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = max(out.rglob("events.out.tfevents.*"), key=lambda path: path.stat().st_size)  # the others hold settings
    accumulator = EventAccumulator(str(events), size_guidance={"scalars": 0})
    accumulator.Reload()

    def scalars(name: str) -> dict[int, float]:
        return {event.step: event.value for event in accumulator.Scalars(f"train/{name}")}

    steps: dict[str, Any] = {}
    for branch in branches:
        kl, tokens, beta = scalars(kl_of(branch)), scalars(kl_of(branch, "_tokens")), scalars(beta_of(branch))
        steps[branch] = [(kl.get(step, 0.0), tokens[step], beta[step]) for step in sorted(tokens)]
    return {"branches": steps, "held_out": json.loads((out / HELD_OUT_FILE).read_text())}


def windows(steps: Sequence[tuple[float, float, float]], size: int) -> list[float | None]:
    """The mean KL of each window over its tokens; `None` for a window without tokens."""
    means: list[float | None] = []
    for start in range(0, len(steps) - size + 1, size):
        part = steps[start : start + size]
        tokens = sum(count for _, count, _ in part)
        means.append(sum(kl * count for kl, count, _ in part) / tokens if tokens else None)
    return means


def share_in_band(means: Sequence[float | None], band: tuple[float, float]) -> float:
    """The share of counted windows that lie in the band; NaN without any."""
    kept = [kl for kl in means[round(SETTLING * len(means)) :] if kl is not None]
    return sum(band[0] <= kl <= band[1] for kl in kept) / len(kept) if kept else float("nan")


def draw(runs: dict[str, list[dict[str, Any]]], bands: dict[str, tuple[float, float]], size: int, path: Path) -> None:
    """Draw the KL by window with its band, and the coefficients below it. Each branch has a column."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "salesrl"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(bands), figsize=(5 * len(bands), 5.2), sharex=True, squeeze=False)
    for column, (branch, (low, high)) in enumerate(bands.items()):
        top, bottom = axes[0][column], axes[1][column]
        top.axhspan(low, high, color="#b0d8b0", label=f"band {low:g} to {high:g}")
        for arm, results in runs.items():
            for index, result in enumerate(results):
                steps = result["branches"][branch]
                means = windows(steps, size)
                at = [size * (number + 1) for number in range(len(means))]
                label = arm if index == 0 else None
                top.plot(at, [kl or float("nan") for kl in means], color=COLOURS[arm], lw=1, label=label)
                bottom.plot(range(1, len(steps) + 1), [beta for *_, beta in steps], color=COLOURS[arm], lw=1)
        top.set_title(branch)
        top.set_yscale("log")
        bottom.set_yscale("log")
        bottom.set_xlabel("optimizer step")
        top.legend(fontsize=8)
    axes[0][0].set_ylabel(f"KL, nats per token, mean of {size} steps")
    axes[1][0].set_ylabel("coefficient beta")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> None:
    """Run the missing runs, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="a run of each arm for each seed")
    parser.add_argument("--steps", type=int, default=160, help="optimizer steps of a run")
    parser.add_argument("--window", type=int, default=5, help="kl_update_steps of the controlled arm")
    parser.add_argument("--learning_rate", default="1e-3", help="constant after the warm-up")
    parser.add_argument(
        "--branch_kl",
        default='{"fairness": {"beta": 0.1, "low": 0.1, "high": 0.2},'
        ' "hallucination": {"beta": 0.1, "low": 0.1, "high": 0.2}}',
    )
    parser.add_argument("--plot", type=Path, help="SVG file to write")
    args, more = parser.parse_known_args(argv)  # the rest goes to the recipe
    bands = {branch: (band["low"], band["high"]) for branch, band in json.loads(args.branch_kl).items()}
    settings = ["--max_steps", str(args.steps), "--learning_rate", args.learning_rate]
    settings += ["--lr_scheduler_type", "constant_with_warmup", "--branch_kl", args.branch_kl]
    settings += ["--kl_update_steps", str(args.window), *(word for word in more if word != "--")]
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for seed in args.seeds:
        for arm in ARMS:
            out = args.out / f"{arm}-{seed}"
            train(arm, seed, out, settings)
            runs[arm].append(read(out, list(bands)))
            report(arm, seed, runs[arm][-1], bands, args.window)
    for arm, results in runs.items():
        for branch, band in bands.items():
            shares = [share_in_band(windows(result["branches"][branch], args.window), band) for result in results]
            print(f"{arm}: {branch} in band {statistics.fmean(shares):.0%} of the windows after settling")
    if args.plot:
        draw(runs, bands, args.window, args.plot)


def report(arm: str, seed: int, run: dict[str, Any], bands: dict[str, tuple[float, float]], size: int) -> None:
    """Print a run's figures on one line."""
    first, last = run["held_out"][0], run["held_out"][-1]
    words = [f"{arm} seed {seed}:"]
    for branch, band in bands.items():
        steps = run["branches"][branch]
        share = share_in_band(windows(steps, size), band)
        reward = f"reward {first[branch]:.3f} -> {last[branch]:.3f}"
        words.append(f"{branch} {share:.0%} in band, beta {steps[0][2]:.3g} -> {steps[-1][2]:.3g}, {reward};")
    words.append(f"held-out {first['reward']:.3f} -> {last['reward']:.3f}")
    print(" ".join(words), flush=True)


if __name__ == "__main__":
    main()
