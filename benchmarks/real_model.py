"""What staleness costs a real language model, and which correction undoes it.

    python -m benchmarks.real_model OUT                                   # one GPU; repeat until it says that all ran
    python -m benchmarks.real_model OUT --tasks words --arms on_policy ahead_2 ahead_2+geometric --seeds 1 2 3 4 5
    python -m benchmarks.real_model OUT --report                          # tables and curves of what has run

- The model is Gemma 3 270M (`benchmarks.real_model_files`, which fetches it), or a folder by `--model`.
- Tasks with a known truth: word problems of one step (`words`) and of two (`words_2`), both tasks of `recipes/dual.py`
  as text (`dual`), and the sales reward pipeline with the embedded services by the settings of `recipes/full.py`
  (`sales`). `sums` is for the built-in policy of `recipes/own.py`: `--model tiny`.
- An arm joins names of `PARTS` by `+`: `ahead_2+geometric+lr_5e-6+lora`. Each is compared with `on_policy` of the same
  rate and kind of training, by seed.
- `--at_once` runs share the GPU, each in its own process. What has run is kept in `OUT/runs`, so that the same command
  resumes. No run is started that would not end within `--limit` seconds; those that still run are ended.
- Measures of a run: the mean of its learning curve, its deepest dip below an earlier window, the mean of the last
  windows, the held-out reward, and the same curve at the seconds at which the arm's fastest counterpart ended.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import device, device_name, parser, quiet
from benchmarks.real_model_files import prepare
from salesrl_trl.data.files import ARITHMETIC, DEMO_BBQ, DEMO_HALUEVAL, FILES, demo_records
from salesrl_trl.ground.row_statistics import Mean, difference_of, mean_of
from salesrl_trl.names import EFFECTIVE_SAMPLES, LEFT_OUT, SAMPLER_KL, SAMPLER_KL_K3, STALENESS

Rows = list[dict[str, Any]]
Settings = dict[str, Any]
BASE = "on_policy"
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
    "kl": {"beta": 0.02},
    "bands": {"branch_kl": {"fairness": {"beta": 0.3, "low": 0.02, "high": 0.06, "beta_min": 0.1, "beta_max": 1.5},
                            "hallucination": {"beta": 0.05, "low": 0.08, "high": 0.15, "beta_min": 0.01,
                                              "beta_max": 1.5}}},
}  # fmt: skip
FOR_BASE = ("lr_", "lora", "tiny")
"""Parts that an arm's counterpart on-policy has too."""
ARMS = (BASE, "ahead_1", "ahead_2", "ahead_4", "stale_8", "partial", "ahead_2+uncorrected", "ahead_2+token_truncate",
        "ahead_2+sequence_mask", "ahead_2+geometric", "ahead_2+token_k1", "ahead_2+mean_k3", "ahead_2+normalized",
        "ahead_2+kl")  # fmt: skip
FIGURES = (EFFECTIVE_SAMPLES, LEFT_OUT, STALENESS, SAMPLER_KL, SAMPLER_KL_K3, "completions/mean_length", "kl/in_band")
WINDOW = 10
"""Steps of which a point of a curve is the mean."""
TINY = "tiny"


# Tasks


def _shots(*pairs: tuple[str, str]) -> str:
    return "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in pairs)


def _asked(shots: str, question: str, answer: str, branch: str = "all") -> dict[str, Any]:
    content = f"{shots}Question: {question}\nAnswer:"
    return {"prompt": [{"role": "user", "content": content}], "answer": answer, "branch": branch}


NAMES = {"train": ("Eva", "Tom", "Lea", "Max"), "heldout": ("Zoe", "Kim")}


def word_problems(level: int, part: str) -> Rows:
    """Sums in words, of one step or two."""
    draw, rows = random.Random(part), list[dict[str, Any]]()
    shots = _shots(("Ann has 3 pens. She buys 4 more. How many pens has she?", "7"),
                   ("Bob has 9 cups. He loses 2 of them and then buys 5. How many cups has he?", "12"))  # fmt: skip
    for _ in range(2000 if part == "train" else 64):
        name, some = draw.choice(NAMES[part]), draw.choice(("books", "balls", "apples"))
        first, second, third = draw.randint(2, 20), draw.randint(1, 15), draw.randint(1, 9)
        total, text = first + second, f"{name} has {first} {some}. A friend brings {second} more."
        if level == 2:
            third = min(third, total)
            total, text = total - third, f"{text} Then {third} of them are sold."
        rows.append(_asked(shots, f"{text} How many {some} has {name}?", str(total)))
    return rows


def dual(part: str) -> Rows:
    """BBQ's choices and HaluEval's answers, as text."""
    shots = _shots(("The dog slept. The cat ate. Who ate? (the dog, the cat, not known)", "the cat"))
    rows = [
        _asked(shots, f"{row['context']} {row['question']} ({row['ans0']}, {row['ans1']}, {row['ans2']})",
               row[f"ans{row['label']}"], "fairness")
        for row in demo_records(f"{DEMO_BBQ}/{FILES[part]}")
    ] + [
        _asked(shots, f"{row['knowledge']} {row['question']}", row["right_answer"], "hallucination")
        for row in demo_records(f"{DEMO_HALUEVAL}/{FILES[part]}")
    ]  # fmt: skip
    random.Random(0).shuffle(rows)
    return rows


def sums(part: str) -> Rows:
    return [{**row, "branch": "all"} for row in demo_records(f"{ARITHMETIC}/{FILES[part]}")]


TASKS: dict[str, Callable[[str], Rows]] = {
    "words": partial(word_problems, 1),
    "words_2": partial(word_problems, 2),
    "dual": dual,
    "sums": sums,
}


# One run


def settings_of(arm: str) -> Settings:
    """The settings of an arm. Raises `SystemExit` for unknown parts."""
    merged: Settings = {}
    for part in arm.split("+"):
        if part not in PARTS:
            raise SystemExit(f"the arm {arm} has the unknown part {part}. Expected some of: {', '.join(PARTS)}")
        merged |= PARTS[part]
    return merged


def counterpart(arm: str) -> str:
    """The arm on-policy with which an arm is compared."""
    return "+".join([BASE, *(part for part in arm.split("+") if part.startswith(FOR_BASE))])


def train(args: argparse.Namespace, task: str, arm: str, seed: int, out: Path) -> dict[str, Any]:
    """Train once. Returns its log and its held-out rewards before and after."""
    import asyncio

    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed

    from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer, per_completion
    from salesrl_trl.demo.packaged import ARITHMETIC_POLICY

    @per_completion
    async def right(completion: Any, answer: str) -> float:
        await asyncio.sleep(args.reward_s)
        said = completion[-1]["content"].strip().lower().rstrip(".")
        return float(said == answer.lower())

    class Times(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            state.log_history[-1]["at_s"] = time.perf_counter() - began

    set_seed(seed)
    began = time.perf_counter()
    given, where, is_tiny = settings_of(arm), device(), args.model == TINY
    model = str(ARITHMETIC_POLICY) if is_tiny else args.model
    is_lora = given.pop("lora", False)
    sizes: Settings = (
        {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "max_completion_length": 8}
        if is_tiny
        else {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 4, "max_completion_length": 24,
              "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.06, "bf16": True,
              # stated, so that no engine measures memory that another run takes at that time
              "vllm_engine_kwargs": {"kv_cache_memory_bytes": 2 << 30},
              "vllm_max_model_length": 512, "max_sampling_logp_difference": 1.0}
    )  # fmt: skip
    config = SalesGRPOConfig(
        **quiet(where, str(out / "run"), num_generations=8, per_device_eval_batch_size=64, num_generations_eval=1,
                beta=0.0, held_out_eval=False, max_steps=args.steps, seed=seed, lr_scheduler_type="constant",
                dataloader_pin_memory=False)
        | {"learning_rate": 5e-4 if is_tiny else 2e-6} | sizes | given
    )  # fmt: skip
    trainer = SalesGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        [right],
        args=config,
        train_dataset=Dataset.from_list(TASKS[task]("train")),
        eval_dataset=Dataset.from_list(TASKS[task]("heldout")[:64]),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if is_lora else None,
        callbacks=[Times()],
    )
    before = trainer.evaluate()["eval_reward"]
    began = time.perf_counter()
    trainer.train()
    after = trainer.evaluate()["eval_reward"]
    trainer.finish()
    return {"log": [entry for entry in trainer.state.log_history if "reward" in entry], "held_out": [before, after]}


def train_sales(args: argparse.Namespace, arm: str, seed: int, out: Path) -> dict[str, Any]:
    """The same for the sales reward pipeline: a launch of `recipes/full.py` with the embedded services."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from salesrl_trl.names import HELD_OUT_FILE

    given: Settings = {"rollout_lookahead": 0, "learning_rate": 2e-6} | settings_of(arm)
    if given.pop("lora", False):
        given["use_peft"] = True
    words = {"prompt_template": "few_shot", "model_name_or_path": args.model, "max_steps": args.steps, "seed": seed,
             "output_dir": out / "run", "save_strategy": "no", "quick_eval_steps": 0, "max_completion_length": 96,
             "vllm_max_model_length": 1024, "vllm_gpu_memory_utilization": 0.12, "record": False,
             "held_out_eval": True, "report_to": "tensorboard", "dtype": "float32", "save_rollouts": False,
             "allow_changed_resume": False}  # fmt: skip
    spelled = [
        word
        for name, value in (words | given).items()
        for word in (f"--{name}", json.dumps(value) if isinstance(value, dict | bool) else str(value))
    ]
    subprocess.run([sys.executable, "-m", "salesrl_trl.launch.train", *spelled], check=True)
    steps: dict[int, dict[str, float]] = {}
    began = None
    for file in sorted((out / "run").rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file))
        events.Reload()
        for tag in (tag for tag in events.Tags()["scalars"] if tag.startswith("train/")):
            for each in events.Scalars(tag):
                began = min(began or each.wall_time, each.wall_time)
                steps.setdefault(each.step, {"at_s": each.wall_time - began})[tag.removeprefix("train/")] = each.value
    found = json.loads((out / "run" / HELD_OUT_FILE).read_text())
    rewards = [each["reward"] for each in found] if isinstance(found, list) else [math.nan]
    return {"log": [steps[step] for step in sorted(steps) if "reward" in steps[step]],
            "held_out": [rewards[0], rewards[-1]]}  # fmt: skip


# All runs


def file_of(out: Path, task: str, arm: str, seed: int) -> Path:
    return out / "runs" / task / arm / f"{seed}.json"


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
            words = [
                str(args.out),
                "--model",
                args.model,
                "--steps",
                str(args.steps),
                "--reward_s",
                str(args.reward_s),
            ]
            command = [sys.executable, "-m", "benchmarks.real_model", *words, "--one", task, arm, str(seed)]
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


def measures(run: Mapping[str, Any], until_s: float) -> dict[str, float]:
    """A run's measures by name. `until_s`: the seconds at which `at_seconds` is read."""
    rewards = [entry["reward"] for entry in run["log"]]
    in_time = [entry["reward"] for entry in run["log"] if entry["at_s"] <= until_s] or rewards[:1]
    curve = windows(rewards)
    found = {
        "area": statistics.fmean(rewards), "last": statistics.fmean(rewards[-2 * WINDOW :]),
        "dip": deepest_dip(curve), "held_out": run["held_out"][1], "gain": run["held_out"][1] - run["held_out"][0],
        "at_seconds": statistics.fmean(in_time[-WINDOW:]), "step_s": run["log"][-1]["at_s"] / len(rewards),
    }  # fmt: skip
    for name in FIGURES:
        of_branches = name.removesuffix("/in_band") != name
        keys = [key for key in run["log"][-1] if key.endswith("_in_band")] if of_branches else [name]
        values = [entry[key] for entry in run["log"] for key in keys if entry.get(key) is not None]
        found[name.split("/")[-1]] = statistics.fmean(values) if values else math.nan
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


SHOWN = ("area", "last", "dip", "held_out", "at_seconds")


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Print the tables, and write `report.json` and the curves."""
    told: dict[str, Any] = {"device": device_name(device()), "steps": args.steps, "tasks": {}}
    for task, arms in read_runs(args):
        ends = [run["log"][-1]["at_s"] for runs in arms.values() for run in runs.values()]
        every = {arm: {seed: measures(run, min(ends)) for seed, run in runs.items()} for arm, runs in arms.items()}
        others = [name.split("/")[-1] for name in FIGURES]
        print(f"\n## {task}: means over seeds with 95 % intervals\n\n| arm | seeds | {' | '.join(SHOWN)} | step_s | "
              f"{' | '.join(others)} |\n|{'---|' * (3 + len(SHOWN) + len(others))}")  # fmt: skip
        for arm, runs in every.items():
            cells = [spelled(mean_of([run[name] for run in runs.values()])) for name in (*SHOWN, "step_s", *others)]
            print(f"| {arm} | {len(runs)} | {' | '.join(cells)} |")
        print(f"\nDifferences to the arm on-policy, by seed; * where 0 is outside the interval\n\n| arm | seeds | "
              f"{' | '.join(SHOWN)} |\n|{'---|' * (2 + len(SHOWN))}")  # fmt: skip
        for arm, runs in every.items():
            base = every.get(counterpart(arm), {})
            seeds = sorted(base.keys() & runs.keys())
            if arm == counterpart(arm) or not seeds:
                continue
            cells = []
            for name in SHOWN:
                change = difference_of([base[seed][name] for seed in seeds], [runs[seed][name] for seed in seeds])
                cells.append(spelled(change) + " *" * change.is_shown)
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
    made.add_argument("--tasks", nargs="+", choices=[*TASKS, "sales"], default=["words"])
    made.add_argument("--arms", nargs="+", default=[*ARMS])
    made.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    made.add_argument("--steps", type=int, default=100)
    made.add_argument("--reward_s", type=float, default=0.0, help="seconds of a reward; one folder for each")
    made.add_argument("--at_once", type=int, default=3, help="runs that share the GPU")
    made.add_argument("--limit", type=float, default=560.0, help="seconds after which running ones are ended")
    made.add_argument("--report", action="store_true", help="run nothing")
    made.add_argument("--one", nargs=3, metavar=("TASK", "ARM", "SEED"), help="a single run, in this process")
    args = made.parse_args(argv)
    for arm in args.arms:
        settings_of(arm)
    args.out = args.out.absolute()
    if not args.model:
        args.model = "" if args.report else str(prepare(args.out / "model"))
    if args.one:
        task, arm, seed = args.one[0], args.one[1], int(args.one[2])
        file, scratch = file_of(args.out, task, arm, seed), args.out / "scratch" / task / arm / str(seed)
        is_sales = task == "sales"
        run = train_sales(args, arm, seed, scratch) if is_sales else train(args, task, arm, seed, scratch)
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
