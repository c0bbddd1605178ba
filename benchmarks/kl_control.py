"""KL laws beside no control, in real training of the small policy: runs, a table, a plot.

    .venv/bin/python -m benchmarks.kl_control OUT_DIR [--seeds 1 2 3] [--arms none former packaged]
        [--recipe debug] [--window 3] [--branch_kl JSON] [--at_once 1] [--plot FILE.svg] [-- more settings]
    .venv/bin/python -m benchmarks.kl_control OUT_DIR --recipe dual --arms free packaged --seeds 1 2 3 4 5

Runs a recipe for each arm and seed. A run that is complete in OUT_DIR is not run again. It prints for each run
and each arm, over windows of 5 updates after the first third:

- the share of windows whose mean KL lies in the branch's band, for each branch and for both at once;
- the number of counted windows that lie outside;
- updates until the branch's KL was in band for the first time after it was above it;
- the gain of the held-out reward, and its share of the gain without control.

The plot needs matplotlib (the `plots` extra). It shows the KL of each window with its band, and the coefficients.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from salesrl_trl.names import HELD_OUT_FILE, beta_of, kl_of

ARMS = {
    "free": ["--branch_kl", '{"fairness": {"beta": 0.0001}, "hallucination": {"beta": 0.0001}}'],
    "none": ["--branch_kl.settings.law", "fixed"],
    "former": ["--branch_kl.settings.law", "benchmarks.kl_laws.FactorLaw"],
    "packaged": [],
}
"""Settings by arm: coefficients that do nothing, fixed ones, the packaged law of before, the packaged law. The first
arm that is run without a law is the one whose gain the others are compared with."""
SIZE = 5
"""Optimizer steps of a window in the figures, whatever the law's own windows are."""
SETTLING = 1 / 3
"""Share of a run in which a coefficient may look for its value. Its windows are not counted."""
BANDS = (
    '{"fairness": {"beta": 0.1, "low": 0.02, "high": 0.06}, "hallucination": {"beta": 0.3, "low": 0.08, "high": 0.15}}'
)
COLOURS = {"free": "#c0a020", "none": "#c05020", "former": "#808080", "packaged": "#2060b0"}
TITLES = ("run", "in band", "both in band", "windows outside", "updates until back", "coefficients at the end",
          "held-out reward", "share of the gain without control")  # fmt: skip


def train(recipe: str, arm: str, seed: int, out: Path, settings: Sequence[str]) -> None:
    """Run the recipe, unless the same run with the same settings is in the folder."""
    kept = out.with_suffix(".json")
    if (out / HELD_OUT_FILE).is_file():
        if json.loads(kept.read_text()) != list(settings):
            raise SystemExit(f"{out} holds a run with other settings. Remove it, or name another folder.")
        return
    configuration = Path("accelerate_configs", f"{recipe}.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(configuration)] if configuration.is_file() else []
    command += [f"recipes/{recipe}.py", "--output_dir", str(out), "--seed", str(seed), *settings, *ARMS[arm]]
    out.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(list(settings)))
    with out.with_suffix(".log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)


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


def in_band(means: Sequence[float | None], band: tuple[float, float]) -> list[bool | None]:
    """Whether each counted window lies in the band; `None` for one without tokens."""
    kept = means[math.ceil(SETTLING * len(means)) :]
    return [None if kl is None else band[0] <= kl <= band[1] for kl in kept]


def until_back(means: Sequence[float | None], high: float) -> int | None:
    """Updates from the first window above the band until one that is not; `None` if it never was above it."""
    above = [kl is not None and kl > high for kl in means]
    if True not in above:
        return None
    first = above.index(True)
    return SIZE * next((number for number, is_above in enumerate(above[first:]) if not is_above), len(above) - first)


def figures(run: Mapping[str, Any], bands: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """A run's figures: by branch the counted windows in band, updates until back, the last coefficient; rewards."""
    means = {branch: windows(run["branches"][branch], SIZE) for branch in bands}
    rewards = [evaluation["reward"] for evaluation in run["held_out"]]
    return {
        "in": {branch: in_band(means[branch], band) for branch, band in bands.items()},
        "back": {branch: until_back(means[branch], high) for branch, (_, high) in bands.items()},
        "beta": {branch: run["branches"][branch][-1][2] for branch in bands},
        "rewards": (rewards[0], rewards[-1]),
    }


def row(name: str, runs: Sequence[Mapping[str, Any]], gain: float) -> str:
    """A row of the table: one run's figures, or those of several in one."""
    branches = list(runs[0]["in"])
    counted = {branch: [is_in for run in runs for is_in in run["in"][branch]] for branch in branches}
    known = {branch: [is_in for is_in in counted[branch] if is_in is not None] for branch in branches}
    both = [all(pair) for pair in zip(*counted.values(), strict=True) if None not in pair]
    back = {branch: [run["back"][branch] for run in runs if run["back"][branch] is not None] for branch in branches}
    before, after = (fmean(run["rewards"][place] for run in runs) for place in (0, 1))
    cells = (
        name,
        " / ".join(f"{fmean(each):.0%}" if each else "-" for each in known.values()),
        f"{fmean(both):.0%}" if both else "-",
        " / ".join(f"{len(each) - sum(each)} of {len(each)}" for each in known.values()),
        " / ".join(f"{fmean(each):.0f}" if each else "-" for each in back.values()),
        " / ".join(f"{fmean(run['beta'][branch] for run in runs):.3g}" for branch in branches),
        f"{before:.3f} -> {after:.3f} ({after - before:+.3f})",
        f"{(after - before) / gain:.0%}" if gain > 0 else "-",
    )
    return f"| {' | '.join(cells)} |"


def draw(runs: dict[str, list[dict[str, Any]]], bands: dict[str, tuple[float, float]], path: Path) -> None:
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
                means = windows(steps, SIZE)
                at = [SIZE * (number + 1) for number in range(len(means))]
                label = arm if index == 0 else None
                top.plot(at, [kl or float("nan") for kl in means], color=COLOURS[arm], lw=1, label=label)
                bottom.plot(range(1, len(steps) + 1), [beta for *_, beta in steps], color=COLOURS[arm], lw=1)
        top.set_title(branch)
        top.set_yscale("log")
        bottom.set_yscale("log")
        bottom.set_xlabel("optimizer step")
        top.legend(fontsize=8)
    axes[0][0].set_ylabel(f"KL, nats per token, mean of {SIZE} steps")
    axes[1][0].set_ylabel("coefficient beta")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> None:
    """Run the missing runs, print the table, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="a run of each arm for each seed")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["none", "former", "packaged"])
    parser.add_argument("--recipe", default="debug", choices=["debug", "dual"])
    parser.add_argument("--window", type=int, help="update_steps: the laws' own windows. 3, or dual's own")
    parser.add_argument("--branch_kl", help="bands: those above, or dual's own")
    parser.add_argument("--at_once", type=int, default=1, help="runs beside each other on one GPU")
    parser.add_argument("--plot", type=Path, help="SVG file to write")
    args, more = parser.parse_known_args(argv)  # the rest goes to the recipe
    own = yaml.safe_load(Path(f"recipes/{args.recipe}.yaml").read_text())
    asked = args.branch_kl or (json.dumps(own["branch_kl"]) if args.recipe == "dual" else BANDS)
    bands = {branch: (band["low"], band["high"]) for branch, band in json.loads(asked).items()}
    window = args.window or (5 if args.recipe == "dual" else 3)
    settings = ["--branch_kl", asked, "--branch_kl.settings.update_steps", str(window)]
    settings += ["--quick_eval_steps", "0", *(word for word in more if word != "--")]
    with ThreadPoolExecutor(args.at_once) as pool:
        started = [
            pool.submit(train, args.recipe, arm, seed, args.out / f"{arm}-{seed}", settings)
            for arm in args.arms
            for seed in args.seeds
        ]
        for run in started:
            run.result()
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in args.arms}
    print(f"branches: {' / '.join(bands)}\n| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}")
    gains: dict[int, float] = {}
    for arm in args.arms:
        for seed in args.seeds:
            runs[arm].append(read(args.out / f"{arm}-{seed}", list(bands)))
            found = figures(runs[arm][-1], bands)
            if arm in ("free", "none"):
                gains.setdefault(seed, found["rewards"][1] - found["rewards"][0])
            print(row(f"{arm}, seed {seed}", [found], gains.get(seed, 0.0)), flush=True)
    for arm, results in runs.items():
        gain = fmean(gains.values()) if gains else 0.0
        print(row(f"**{arm}**", [figures(run, bands) for run in results], gain))
    if args.plot:
        draw(runs, bands, args.plot)


if __name__ == "__main__":
    main()
