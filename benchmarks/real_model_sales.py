"""The task `sales` of `benchmarks.real_model`: the reward pipeline by the settings of `recipes/full.py`.

    python -m benchmarks.real_model OUT --tasks sales --arms on_policy --seeds 1 2 3 --judge self --steps 200

- `--judge services`: the embedded services, whose judge knows what makes a good answer.
- `--judge self`: the policy's first weights judge, over vLLM's server. The embedded judge is the second judge of the
  drift monitor, and scores the held-out rows before and after training: `true`, beside what the run learnt to please.
  Verdicts, failures and the monitor's metrics by step are in `OUT/runs`, its lines in `OUT/logs`. One folder for each
  judge.
- `--model tiny`: the built-in policy, with the recipe's settings for it. It can't be the judge: its context is too
  short.
- The recipe has a KL controller for each branch. The arm `kl` has one constant coefficient instead.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

JUDGES = SERVICES, SELF = ("services", "self")
SECOND = "embedded"
SHARE = 0.1
"""Of the completions that the second judge scores: five times the setting's default, as it is free here."""
KV_BYTES = 3 << 30
"""Stated, so that no engine measures memory that another run takes at that time."""
OF_THE_MODEL = {"prompt_template": "few_shot", "max_completion_length": 96, "vllm_max_model_length": 1024,
                "learning_rate": 2e-6, "vllm_gpu_memory_utilization": 0.12, "dtype": "float32",
                "vllm_engine_kwargs": {"kv_cache_memory_bytes": KV_BYTES}}  # fmt: skip
"""Settings for which the built-in policy has its own."""
Settings = dict[str, Any]
RECIPES = Path(__file__).parents[1] / "recipes"


def train_sales(args: argparse.Namespace, given: Settings, seed: int, out: Path) -> dict[str, Any]:
    """Launch once. `given`: the arm's settings. Returns the run's log, its held-out rewards, and those by the embedded
    judge where another one is the reward."""
    out.mkdir(parents=True, exist_ok=True)
    run = out / "run"
    with judged_by(args.judge, args.model, out) as judges:
        launch("train", [], settings_of(args, given, seed, run) | judges)
    found: dict[str, Any] = {"log": log_of(run), "held_out": held_out_of(run)}
    if args.judge != SERVICES:
        found["true"] = true_rewards(run, out / "evaluation.json", args.model)
    return found


def settings_of(args: argparse.Namespace, given: Settings, seed: int, run: Path) -> Settings:
    """The settings of a launch, without those of its judges."""
    given, is_tiny = dict(given), args.model == "tiny"
    if given.pop("lora", False):
        given["use_peft"] = True
    if "beta" in given:
        given["branch_kl"] = {}
    words: Settings = {} if is_tiny else OF_THE_MODEL | {"model_name_or_path": args.model}
    words |= {"max_steps": args.steps, "seed": seed, "output_dir": run, "save_strategy": "no", "quick_eval_steps": 0,
              "rollout_lookahead": 0, "record": False, "held_out_eval": True, "report_to": "tensorboard",
              "save_rollouts": False, "allow_changed_resume": False}  # fmt: skip
    return words | given


def words_of(settings: Settings) -> list[str]:
    """Settings as words of a command line."""
    return [
        word
        for name, value in settings.items()
        for word in (f"--{name}", json.dumps(value) if isinstance(value, dict | list | bool) else str(value))
    ]


def check_launch(settings: Settings, recipe: str, further: Sequence[str] = ()) -> None:
    """Read the settings of a launch, before a server starts for it. Raises `ConfigError`."""
    from salesrl_trl.launch.settings import parse

    with mock.patch.dict(os.environ):  # settings of a trainer set variables
        parse([*words_of(settings), *further], RECIPES / f"{recipe}.yaml")


def launch(command: str, first: list[str], settings: Settings) -> None:
    command = f"salesrl_trl.launch.{command}"
    subprocess.run([sys.executable, "-m", command, *first, *words_of(settings)], check=True)


@contextmanager
def judged_by(judge: str, model: str, out: Path) -> Iterator[Settings]:
    """The settings of a judge that answers within the block."""
    if judge == SERVICES:
        yield {}
        return
    from benchmarks.vllm_server import vllm_server
    from salesrl_trl.demo.services.launcher import EMBEDDED_MODEL, EmbeddedServices

    options = ["--served-model-name", SELF, "--gpu-memory-utilization", "0.12"]
    options += ["--kv-cache-memory-bytes", str(KV_BYTES)]
    with vllm_server(Path(model), out / "judge.txt", *options) as url, EmbeddedServices() as embedded:
        providers = [
            {"name": SELF, "base_url": f"{url}/v1", "model": SELF},
            {"name": SECOND, "base_url": embedded.judge_base_url, "model": EMBEDDED_MODEL},
        ]
        yield {"judge_providers": providers, "judge_meter": {"second": SECOND, "share": SHARE}}


def log_of(run: Path) -> list[dict[str, float]]:
    """A run's metrics by step, of TensorBoard's files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps: dict[int, dict[str, float]] = {}
    began = None
    for file in sorted(run.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file))
        events.Reload()
        for tag in (tag for tag in events.Tags()["scalars"] if tag.startswith("train/")):
            for each in events.Scalars(tag):
                began = min(began or each.wall_time, each.wall_time)
                steps.setdefault(each.step, {"at_s": each.wall_time - began})[tag.removeprefix("train/")] = each.value
    return [steps[step] for step in sorted(steps) if "reward" in steps[step]]


def held_out_of(run: Path) -> list[float]:
    """The run's own held-out rewards, before and after."""
    from salesrl_trl.names import HELD_OUT_FILE

    found = json.loads((run / HELD_OUT_FILE).read_text())
    rewards = [each["reward"] for each in found] if isinstance(found, list) else [math.nan]
    return [rewards[0], rewards[-1]]


def true_rewards(run: Path, file: Path, model: str) -> list[float]:
    """The rewards of greedy answers by the embedded judge, before and after training."""
    recipe = str(RECIPES / "full.yaml")  # and not the run's settings, with its judges
    own = OF_THE_MODEL | {"output": file, "samples": 0}
    launch("evaluate", ["--config", recipe, "--policy", model, str(run)], own)
    found = json.loads(file.read_text())["figures"]
    return [each["branches"]["all"]["reward"]["value"] for each in found]
