"""What staleness costs a real language model, and which correction undoes it.

    python -m benchmarks.real_model OUT                                   # one GPU; repeat until it says that all ran
    python -m benchmarks.real_model OUT --tasks words --arms on_policy ahead_2 ahead_2+geometric --seeds 1 2 3 4 5
    python -m benchmarks.real_model OUT --report                          # tables and curves of what has run

- The model is Gemma 3 270M (`benchmarks.real_model_files`, which fetches it), or a folder by `--model`.
- Tasks with a known truth (`benchmarks.real_model_tasks`): word problems of one step (`words`), of two (`words_2`) and
  of one to four (`steps`), both tasks of `recipes/dual.py` as text (`dual`), and the sales reward pipeline by the
  settings of `recipes/full.py` (`sales`, in `benchmarks.real_model_sales`). `sums` and `digits` are for the built-in
  policy of `recipes/own.py`: `--model tiny`.
- An arm joins names of `PARTS` by `+`: `ahead_2+geometric+lr_5e-6+lora`. Each is compared with `on_policy` of the same
  rate and kind of training, by seed. `stock` is TRL's own trainer. `drawn` and `remembered` draw rows by difficulty
  (`benchmarks.difficulty`). A run with `refill` ends when it has scored as many completions as `on_policy`.
- `--at_once` runs share the GPU, each in its own process. A run takes 9 GiB, and with a server of its own (`sales`) 20
  GiB. What has run is kept in `OUT/runs`, so that the same command resumes. No run is started that would not end
  within `--limit` seconds; those that still run are ended.
- `--seconds` ends each run after so much training instead, whatever steps that takes: what a user gets for an hour
  with rewards of `--reward_s`. Let few runs share the GPU then: one that waits takes nothing from the others.
- Measures of a run: the mean of its learning curve, its deepest dip below an earlier window, the mean of the last
  windows, the held-out reward (`held_area`: the mean of all `--evaluations`), and the same curve when the fastest run
  ended: its last window, and its mean over time (`area_seconds`). For `bands`, `roomy`, and `free` (no control): the
  share of windows in band, by `benchmarks.kl_control`. `gain`: the held-out reward's, as a share of that on-policy.
"""

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common import device, device_name, parser, quiet
from benchmarks.kl_control import SIZE, in_band
from benchmarks.kl_control import windows as of_steps
from benchmarks.real_model_files import prepare
from benchmarks.real_model_sales import JUDGES, SELF, check_launch, train_sales
from benchmarks.real_model_sales import settings_of as launch_of
from benchmarks.real_model_tasks import TASKS, Rows
from salesrl_trl.ground.row_statistics import Mean, difference_of, mean_of
from salesrl_trl.names import EFFECTIVE_SAMPLES, LEFT_OUT, SAMPLER_KL, SAMPLER_KL_K3, STALENESS, kl_of

Settings = dict[str, Any]
BASE, STOCK, SALES = "on_policy", "stock", "sales"
DRAW = "draw"
"""A part's entry, no setting: rows by difficulty, remembered in this `run`, or also from an earlier one's `record`."""
BANDS: dict[str, dict[str, float]] = {
    "fairness": {"beta": 0.3, "low": 0.02, "high": 0.06, "beta_min": 0.1, "beta_max": 1.5},
    "hallucination": {"beta": 0.05, "low": 0.08, "high": 0.15, "beta_min": 0.01, "beta_max": 1.5},
}
"""Of `recipes/dual.yaml`."""
ROOMY: dict[str, dict[str, float]] = {
    "fairness": {"beta": 0.05, "low": 0.4, "high": 1.0},
    "hallucination": {"beta": 0.05, "low": 0.15, "high": 0.35},
}
"""Around the KL of a free run while its reward rises, as docs/how-to/kl-by-branch.md says."""
PARTS: dict[str, Settings] = {
    BASE: {},
    **{f"ahead_{number}": {"rollout_lookahead": number} for number in (1, 2, 4)},
    "stale_8": {"rollout_lookahead": 4, "max_staleness": 8},
    "partial": {"rollout_lookahead": 2, "partial_rollouts": 0.5},
    "uncorrected": {"rollout_correction": {"weights": "none"}},
    **{mode: {"vllm_importance_sampling_mode": mode}
       for mode in ("token_truncate", "token_mask", "sequence_mask", "sequence_truncate")},
    "normalized": {"rollout_correction": {"weights": "normalized"}},
    "bypass": {"rollout_correction": {"weights": "bypass"}},
    "geometric": {"rollout_correction": {"reject": {"seq_mean_k1": [0.98, 1.02]}}},
    "token_k1": {"rollout_correction": {"reject": {"token_k1": [0.5, 2.0]}}},
    "mean_k3": {"rollout_correction": {"reject": {"seq_mean_k3": 0.01}}},
    "bypass_k3": {"rollout_correction": {"weights": "bypass", "reject": {"seq_mean_k3": 0.01}}},
    **{f"lr_{rate}": {"learning_rate": float(rate)} for rate in ("1e-6", "2e-6", "5e-6", "2e-5", "5e-5")},
    "lora": {"lora": True, "learning_rate": 2e-5},
    **{f"high_{bound}": {"epsilon_high": float(bound)} for bound in ("0.2", "0.28", "0.4", "0.7", "1.5")},
    "low_0.5": {"epsilon": 0.5},  # with `high_0.7`: 0.8 and 1.2 for each of three updates
    "delta": {"delta": 3.0},  # bounds the ratio of completions below their group's mean too, as verl's dual clip
    "kl": {"beta": 0.02},
    STOCK: {},
    "refill": {"refill_groups": 3},
    "recorded": {"record": True},
    "wide": {"gradient_accumulation_steps": 4},  # with the tiny policy: 64 completions a step for 32
    "drawn": {DRAW: "run"},
    "remembered": {DRAW: "record"},
    "bands": {"branch_kl": BANDS},
    "roomy": {"branch_kl": ROOMY},
    "free": {"branch_kl": {branch: {"beta": 1e-4} for branch in BANDS}},
}  # fmt: skip
FOR_BASE = ("lr_", "lora", "tiny", "wide")
"""Parts that an arm's counterpart on-policy has too."""
ARMS = (BASE, "ahead_1", "ahead_2", "ahead_4", "stale_8", "partial", "ahead_2+uncorrected", "ahead_2+token_truncate",
        "ahead_2+sequence_mask", "ahead_2+geometric", "ahead_2+token_k1", "ahead_2+mean_k3", "ahead_2+normalized",
        "ahead_2+kl")  # fmt: skip
FIGURES = ("frac_reward_zero_std", EFFECTIVE_SAMPLES, LEFT_OUT, "clip_ratio/region_mean", STALENESS, SAMPLER_KL,
           SAMPLER_KL_K3, "completions/mean_length")  # fmt: skip
WINDOW = 10
"""Steps of which a point of a curve is the mean."""
MOST_STEPS = 100_000
TINY = "tiny"
GROUP = 8
"""Completions of a row."""
EVALUATED = 64
"""Completions of an evaluation's batch."""


# One run


def settings_of(arm: str) -> Settings:
    """The settings of an arm. Raises `SystemExit` for unknown parts."""
    merged: Settings = {}
    for part in arm.split("+"):
        if part not in PARTS:
            raise SystemExit(f"the arm {arm} has the unknown part {part}. Expected some of: {', '.join(PARTS)}")
        merged |= PARTS[part]
    return merged


def sales_settings(arm: str) -> Settings:
    """The same for the task sales. Raises `SystemExit` where an arm is another trainer's."""
    if STOCK in arm.split("+") or DRAW in settings_of(arm):
        raise SystemExit(f"the task sales has no arm {arm}: its launch builds the package's trainer. Expected others.")
    return settings_of(arm)


def counterpart(arm: str) -> str:
    """The arm on-policy with which an arm is compared."""
    return "+".join([BASE, *(part for part in arm.split("+") if part.startswith(FOR_BASE))])


def config_of(args: argparse.Namespace, arm: str, seed: int, out: Path) -> tuple[Any, Settings]:
    """The settings of a run's trainer, and arguments of vLLM for which TRL has none. Raises `ConfigError`."""
    from trl import GRPOConfig

    from salesrl_trl import SalesGRPOConfig

    given, is_tiny, is_stock = settings_of(arm), args.model == TINY, STOCK in arm.split("+")
    for own in (DRAW, "lora"):
        given.pop(own, None)
    sizes: Settings = (
        {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "max_completion_length": 8}
        if is_tiny
        else {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 4, "max_completion_length": 24,
              "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.06, "bf16": True,
              # stated, so that no engine measures memory that another run takes at that time
              "vllm_engine_kwargs": {"kv_cache_memory_bytes": 2 << 30},
              "vllm_max_model_length": 512, "max_sampling_logp_difference": 1.0}
    )  # fmt: skip
    config_type = GRPOConfig if is_stock else SalesGRPOConfig
    settings = (
        quiet(device(), str(out / "run"), num_generations=GROUP, per_device_eval_batch_size=EVALUATED,
              num_generations_eval=args.samples, beta=0.0, held_out_eval=False, seed=seed,
              max_steps=MOST_STEPS if args.seconds else args.steps,
              lr_scheduler_type="constant", dataloader_pin_memory=False)
        | {"learning_rate": 5e-4 if is_tiny else 2e-6} | sizes | given
    )  # fmt: skip
    known = {
        name: value for name, value in settings.items() if not is_stock or name in config_type.__dataclass_fields__
    }
    return config_type(**known), settings.get("vllm_engine_kwargs", {})


def check_arms(args: argparse.Namespace) -> None:
    """Find now what would end a run minutes later. Raises `SystemExit`, or `ConfigError` for settings."""
    if SALES in args.tasks and args.judge == SELF and args.model == TINY:
        raise SystemExit("--judge self needs the folder of a model: the built-in policy's context is too short.")
    if EVALUATED % args.samples:
        raise SystemExit(f"--samples {args.samples}: an evaluation's batch has {EVALUATED} completions, of whole rows")
    for arm in args.arms:
        given = settings_of(arm)
        for task in args.tasks:
            branches = {row["branch"] for row in rows_of(task, "heldout")} if task != SALES else set()
            if task == SALES:
                own = launch_of(args, sales_settings(arm), args.seeds[0], args.out / "scratch")
                check_launch({name: value for name, value in own.items() if name != "model_name_or_path"}, "full")
            elif unknown := sorted(set(given.get("branch_kl", ())) - branches):
                raise SystemExit(f"the arm {arm} has bands for {', '.join(unknown)}, and the task {task} no such rows")
            else:
                config_of(args, arm, args.seeds[0], args.out / "scratch")


def earlier_run(args: argparse.Namespace, task: str, arm: str, seed: int, out: Path) -> Path:
    """The folder of a recorded run on-policy of another seed, which is done first unless it was."""
    arm, seed, out = f"{counterpart(arm)}+recorded", seed + 1000, out / "earlier"
    if not file_of(out, task, arm, seed).is_file():
        subprocess.run(command_of(args, out, task, arm, seed), check=True)
    return scratch_of(out, task, arm, seed) / "run"


def rows_of(task: str, part: str) -> Rows:
    """Rows with an `id`, in an order by chance."""
    rows = [{**row, "id": f"{part}-{number}"} for number, row in enumerate(TASKS[task](part))]
    return random.Random(task).sample(rows, len(rows)) if part == "train" else rows


def train(args: argparse.Namespace, task: str, arm: str, seed: int, out: Path) -> dict[str, Any]:
    """Train once. Returns its log and its held-out rewards: before, at even distances, and after."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
    from trl import GRPOTrainer

    from benchmarks.difficulty import Drawn, Memory
    from benchmarks.real_model_run import reward_of_all, right_of, stock_engine, watch
    from salesrl_trl import SalesGRPOTrainer
    from salesrl_trl.demo.packaged import ARITHMETIC_POLICY

    rows, held_out = rows_of(task, "train")[: args.rows or None], rows_of(task, "heldout")[: args.held_out]
    memory = Memory([row["id"] for row in rows], GROUP)
    given, is_stock = settings_of(arm), STOCK in arm.split("+")
    if (draws := given.get(DRAW)) == "record":
        memory.read(earlier_run(args, task, arm, seed, out))
    set_seed(seed)
    model = str(ARITHMETIC_POLICY) if args.model == TINY else args.model
    config, engine = config_of(args, arm, seed, out)
    trainer_type: Any = (
        GRPOTrainer if is_stock else SalesGRPOTrainer if draws is None else partial(Drawn, memory=memory)
    )
    calls = args.steps * config.generation_batch_size
    with stock_engine(engine if is_stock else {}):
        trainer = trainer_type(
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            [right_of(memory, args.reward_s, is_stock)],
            args=config,
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(held_out),
            processing_class=AutoTokenizer.from_pretrained(model),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if given.get("lora") else None,
            callbacks=[watch(memory, calls, args.evaluations, "refill_groups" in given, args.seconds)],
        )
    before = trainer.evaluate()["eval_reward"]
    trainer.train()
    trainer.evaluate()
    if not is_stock:
        trainer.finish()
    log = trainer.state.log_history
    return {
        "log": [{**entry, "reward": reward_of_all(entry)} for entry in log if "reward" in entry],
        "held_out": [before, *(entry["eval_reward"] for entry in log if "eval_reward" in entry)],
    }


# All runs


def file_of(out: Path, task: str, arm: str, seed: int) -> Path:
    return out / "runs" / task / arm / f"{seed}.json"


def scratch_of(out: Path, task: str, arm: str, seed: int) -> Path:
    return out / "scratch" / task / arm / str(seed)


HANDED_ON = ("model", "steps", "seconds", "reward_s", "rows", "held_out", "samples", "evaluations", "judge")


def command_of(args: argparse.Namespace, out: Path, task: str, arm: str, seed: int) -> list[str]:
    """The command of a single run."""
    words = [word for name in HANDED_ON for word in (f"--{name}", str(getattr(args, name)))]
    return [sys.executable, "-m", "benchmarks.real_model", str(out), *words, "--one", task, arm, str(seed)]


def run_all(args: argparse.Namespace) -> bool:
    """Run what has not run, `args.at_once` at a time, until `args.limit`. Returns whether all has run."""
    ends, longest = time.monotonic() + args.limit, 0.0
    every = [(task, arm, seed) for seed in args.seeds for task in args.tasks for arm in args.arms]
    left = [each for each in every if not file_of(args.out, *each).is_file()]
    running: dict[tuple[str, str, int], tuple[subprocess.Popen[bytes], float]] = {}
    while left or running:
        now = time.monotonic()
        while left and len(running) < args.at_once and now + longest < ends:
            task, arm, seed = each = left.pop(0)
            folder = args.out / "logs" / task / arm
            folder.mkdir(parents=True, exist_ok=True)
            command = command_of(args, args.out, task, arm, seed)
            with (folder / f"{seed}.txt").open("wb") as log:
                running[each] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True), now
        for each, (process, began) in [*running.items()]:
            if process.poll() is not None or now > ends:
                del running[each]
                with suppress(ProcessLookupError):  # also what it started: a launch, its services
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                is_done = file_of(args.out, *each).is_file()
                longest = max(longest, now - began) if is_done else longest
                print(
                    f"{'/'.join(map(str, each))}: {now - began:.0f} s{'' if is_done else ', did not end'}", flush=True
                )
        if now > ends or (not running and now + longest >= ends):
            break
        time.sleep(0.2)
    return all(file_of(args.out, *each).is_file() for each in every)


# What they show


def windows(values: Sequence[float], size: int = WINDOW) -> list[float]:
    """The means of windows of `size` steps, the last one possibly shorter."""
    return [statistics.fmean(values[place : place + size]) for place in range(0, len(values), size)]


def deepest_dip(curve: Sequence[float]) -> float:
    """How far a curve falls below its highest point before."""
    highest, dip = -math.inf, 0.0
    for value in curve:
        highest = max(highest, value)
        dip = max(dip, highest - value)
    return dip


def over_time(log: Sequence[Mapping[str, float]], until_s: float) -> float:
    """The mean reward over seconds: each step's counts from its end until the next one's, and 0 before the first."""
    ends = [*(min(entry["at_s"], until_s) for entry in log), until_s]
    return sum(entry["reward"] * (end - at) for entry, at, end in zip(log, ends, ends[1:], strict=False)) / until_s


def windows_in_band(log: Sequence[Mapping[str, float]]) -> dict[str, list[bool | None]]:
    """By branch with a measured KL, the windows after the first third in its own band or that of `BANDS`, as in
    `benchmarks.kl_control`."""
    found = {}
    for branch, band in BANDS.items():
        if log[-1].get(kl_of(branch, "_high")):
            band = {edge: log[-1][kl_of(branch, f"_{edge}")] for edge in ("low", "high")}
        steps = [(each.get(kl_of(branch)) or 0.0, each.get(kl_of(branch, "_tokens")) or 0.0, 0.0) for each in log]
        if any(tokens for _, tokens, _ in steps):
            found[branch] = in_band(of_steps(steps, SIZE), (band["low"], band["high"]))
    return found


def measures(run: Mapping[str, Any], until_s: float) -> dict[str, float]:
    """A run's measures by name. `until_s`: the seconds at which `at_seconds` is read."""
    rewards = [entry["reward"] for entry in run["log"]]
    in_time = [entry["reward"] for entry in run["log"] if entry["at_s"] <= until_s] or rewards[:1]
    curve = windows(rewards)
    found = {
        "area": statistics.fmean(rewards), "last": statistics.fmean(rewards[-2 * WINDOW :]),
        "dip": deepest_dip(curve), "held_out": run["held_out"][-1], "gain": run["held_out"][-1] - run["held_out"][0],
        "held_area": statistics.fmean(run["held_out"][1:]), "steps": float(len(rewards)),
        "at_seconds": statistics.fmean(in_time[-WINDOW:]), "area_seconds": over_time(run["log"], until_s),
        "step_s": run["log"][-1]["at_s"] / len(rewards), "true": run.get("true", [math.nan])[-1],
    }  # fmt: skip
    for name in FIGURES:
        values = [entry[name] for entry in run["log"] if entry.get(name) is not None]
        found[name.split("/")[-1]] = statistics.fmean(values) if values else math.nan
    for branch, counted in windows_in_band(run["log"]).items():
        known = [is_in for is_in in counted if is_in is not None]
        found[f"in_band {branch}"] = statistics.fmean(known) if known else math.nan
    return found


def read_runs(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, dict[int, dict[str, Any]]]]]:
    """By task, the runs of each arm by seed."""
    for task in args.tasks:
        found = {
            arm: {seed: json.loads(file.read_text()) for seed in args.seeds
                  if (file := file_of(args.out, task, arm, seed)).is_file()}
            for arm in args.arms
        }  # fmt: skip
        yield task, {arm: runs for arm, runs in found.items() if runs}


def spelled(mean: Mean, digits: int = 3) -> str:
    """A mean with its 95 % interval over seeds."""
    if mean.value is None:
        return ""
    reach = "" if mean.interval is None else f" ± {(mean.interval[1] - mean.interval[0]) / 2:.{digits}f}"
    return f"{mean.value:.{digits}f}{reach}"


SHOWN = ("area", "last", "dip", "held_out", "held_area", "at_seconds", "area_seconds")


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Print the tables, and write `report.json` and the curves."""
    told: dict[str, Any] = {"device": device_name(device()), "steps": args.steps, "tasks": {}}
    for task, arms in read_runs(args):
        ends = [run["log"][-1]["at_s"] for runs in arms.values() for run in runs.values()]
        every = {arm: {seed: measures(run, min(ends)) for seed, run in runs.items()} for arm, runs in arms.items()}
        bands = [f"in_band {branch}" for branch in BANDS] * (task == "dual")
        others = ["steps", "step_s", "true", *(name.split("/")[-1] for name in FIGURES), *bands]
        print(f"\n## {task}: means over seeds with 95 % intervals\n\n| arm | seeds | {' | '.join(SHOWN)} | "
              f"{' | '.join(others)} |\n|{'---|' * (2 + len(SHOWN) + len(others))}")  # fmt: skip
        for arm, runs in every.items():
            cells = [
                spelled(mean_of([run.get(name, math.nan) for run in runs.values()])) for name in (*SHOWN, *others)
            ]
            print(f"| {arm} | {len(runs)} | {' | '.join(cells)} |")
        print(f"\nDifferences to the arm on-policy, by seed; * where 0 is outside the interval\n\n| arm | seeds | "
              f"{' | '.join(SHOWN)} | gain |\n|{'---|' * (3 + len(SHOWN))}")  # fmt: skip
        for arm, runs in every.items():
            base = every.get(counterpart(arm), {})
            seeds = sorted(base.keys() & runs.keys())
            if arm == counterpart(arm) or not seeds:
                continue
            cells = []
            for name in SHOWN:
                change = difference_of([base[seed][name] for seed in seeds], [runs[seed][name] for seed in seeds])
                cells.append(spelled(change) + " *" * change.is_shown)
            gain, of = (sum(each[seed]["gain"] for seed in seeds) for each in (runs, base))
            cells.append(f"{gain / of:.2f}" if of > 0 else "")
            print(f"| {arm} | {len(seeds)} | {' | '.join(cells)} |")
        told["tasks"][task] = every
        draw(args.out, task, arms)
    (args.out / "report.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return told


def draw(out: Path, task: str, arms: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> None:
    """The learning curves with bands over seeds, as `OUT/TASK.svg` and `.png`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    if not arms:
        return
    figure, axes = plt.subplots(figsize=(9, 5))
    for arm, runs in arms.items():
        curves = [windows([entry["reward"] for entry in run["log"]]) for run in runs.values()]
        points = [mean_of(each) for each in zip(*curves, strict=False)]
        steps = [(place + 1) * WINDOW for place in range(len(points))]
        [line] = axes.plot(steps, [point.value for point in points], label=arm)
        bounds = [point.interval or (point.value, point.value) for point in points]
        axes.fill_between(steps, *zip(*bounds, strict=True), color=line.get_color(), alpha=0.12)
    axes.set(xlabel="optimizer steps", ylabel="reward", title=f"{task}: means over seeds with 95 % intervals")
    axes.legend(fontsize="small")
    for ending in ("svg", "png"):
        figure.savefig(out / f"{task}.{ending}", dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Run what has not run, and report."""
    made = parser(__doc__)
    made.add_argument("out", type=Path, help="folder of runs, tables and curves; the model goes there too")
    made.add_argument("--model", help=f"folder of a model, or {TINY}; defaults to Gemma 3 270M of the package index")
    made.add_argument("--tasks", nargs="+", choices=[*TASKS, SALES], default=["words"])
    made.add_argument("--arms", nargs="+", default=[*ARMS])
    made.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    made.add_argument("--steps", type=int, default=100)
    made.add_argument("--seconds", type=float, default=0.0, help="of training, instead of --steps")
    made.add_argument("--reward_s", type=float, default=0.0, help="seconds of a reward; one folder for each")
    made.add_argument("--rows", type=int, default=0, help="training rows, at most; 0 for all")
    made.add_argument("--held_out", type=int, default=64, help="held-out rows, at most")
    made.add_argument("--samples", type=int, default=1, help="completions of a held-out row")
    made.add_argument("--evaluations", type=int, default=1, help="in and after a run, which count in its seconds")
    made.add_argument("--judge", choices=JUDGES, default=JUDGES[0], help="of the task sales: see its module")
    made.add_argument("--at_once", type=int, default=3, help="runs that share the GPU")
    made.add_argument("--limit", type=float, default=560.0, help="seconds after which running ones are ended")
    made.add_argument("--report", action="store_true", help="run nothing")
    made.add_argument("--one", nargs=3, metavar=("TASK", "ARM", "SEED"), help="a single run, in this process")
    args = made.parse_args(argv)
    if args.seconds and SALES in args.tasks:
        raise SystemExit("--seconds doesn't end the task sales. Expected --steps, or other tasks.")
    args.out = args.out.absolute()
    if not (args.report or args.one):
        with mock.patch.dict(os.environ):  # settings of a trainer set variables, which the runs would inherit
            check_arms(args)
    if not args.model:
        args.model = "" if args.report else str(prepare(args.out / "model"))
    if args.one:
        task, arm, seed = args.one[0], args.one[1], int(args.one[2])
        file, scratch = file_of(args.out, task, arm, seed), scratch_of(args.out, task, arm, seed)
        is_sales = task == SALES
        run = (
            train_sales(args, sales_settings(arm), seed, scratch)
            if is_sales
            else train(args, task, arm, seed, scratch)
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        begun = file.with_suffix(".begun")
        begun.write_text(json.dumps(run), encoding="utf-8")
        begun.rename(file)
        return
    if not args.report:
        print("all ran" if run_all(args) else "not all ran: give the same command again", flush=True)
    report(args)


if __name__ == "__main__":
    main()
