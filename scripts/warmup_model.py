#!/usr/bin/env python3
"""Fill the caches of a recipe's start: compiled code and CUDA graphs' sizes on disk.

    python scripts/warmup_model.py --model_name_or_path DIR                         # for recipes/full.yaml
    python scripts/warmup_model.py --config recipes/fast_load.yaml --model_name_or_path DIR --use_peft true
    python scripts/warmup_model.py --model_name_or_path DIR --shapes 64x4096 16x2048

Every setting of a run is accepted. It starts as a run does and trains one step, with a reward that calls no service.
The folder `compile_cache_dir` then holds the compiled code. It may be copied to another machine with the same GPUs and
packages. Several processes: `accelerate launch scripts/warmup_model.py ...`, with one shape.
"""

import argparse
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from salesrl_trl.ground.shutdown import EXIT_BAD_INPUT, EXIT_FAILED, end_tidily

if __name__ == "__main__":
    end_tidily()  # before the imports that take seconds

from salesrl_trl.errors import ConfigError, SalesRLError
from salesrl_trl.launch.console import exit_with, set_up_logging
from salesrl_trl.launch.preflight.runner import prepare
from salesrl_trl.launch.preflight.training import rehearse
from salesrl_trl.launch.settings import parse

logger = logging.getLogger("salesrl_trl.warmup")  # whose lines are shown

_NO_EVALUATION = ("--held_out_eval", "false", "--quick_eval_steps", "0", "--eval_strategy", "no")


def main(default_recipe: Path, argv: Sequence[str] | None = None) -> None:
    """Warm up for a recipe, or for each of several shapes in a process of its own, and exit."""
    parser = argparse.ArgumentParser(
        description="Fill the folder of compiled code for a recipe, so that its runs start fast. "
        "Every setting of a run is accepted too.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=[],
        metavar="COMPLETIONSxLENGTH",
        help="completions of a process's generation batch and vllm_max_model_length, such as 64x4096; default: those "
        "of the recipe",
    )
    own, settings = parser.parse_known_args(argv)
    set_up_logging()
    try:
        shapes = [settings_of(shape) for shape in own.shapes]
    except SalesRLError as error:
        exit_with(error, EXIT_BAD_INPUT)
    if len(shapes) > 1:  # an engine leaves memory behind
        runs = [subprocess.run([sys.executable, sys.argv[0], *settings, "--shapes", shape]) for shape in own.shapes]
        raise SystemExit(max(run.returncode for run in runs))
    with tempfile.TemporaryDirectory() as folder:
        _warm_up([*settings, *(shapes[0] if shapes else []), "--output_dir", folder], default_recipe)


def settings_of(shape: str) -> list[str]:
    """Command-line arguments for a shape such as `"64x4096"`. Raises `ConfigError` if it is none."""
    completions, _, length = shape.partition("x")
    if not (completions.isdigit() and length.isdigit()):
        raise ConfigError(f"`--shapes` has {shape!r}. Expected COMPLETIONSxLENGTH, such as 64x4096.")
    return [
        *("--per_device_train_batch_size", completions, "--gradient_accumulation_steps", "1"),
        *("--vllm_max_model_length", length),
    ]


def _warm_up(settings: Sequence[str], default_recipe: Path) -> None:
    try:
        config = parse([*settings, *_NO_EVALUATION], default_recipe)
        folder, training = config.training.compiled, config.training
        if folder is None:
            raise ConfigError(
                "`compile_cache_dir` is not set, so compiled code would go where no run looks for it. "
                "Expected a folder, or auto. Set it in the recipe too."
            )
        config.reward.warm_up_services = False
        plan = prepare(config)
    except Exception as error:
        exit_with(error, EXIT_BAD_INPUT)
    began = time.perf_counter()
    try:
        with plan.opened:
            rehearse(plan, steps=1).train()
    except Exception as error:
        exit_with(error, EXIT_FAILED)
    logger.info(
        f"[WarmUp] after {time.perf_counter() - began:.0f} s: {folder} is filled for up to "
        f"{training.per_device_train_batch_size * training.steps_per_generation} sequences of "
        f"{training.vllm_max_model_length or 'the longest'} tokens"
    )


if __name__ == "__main__":
    main(Path(__file__).parents[1] / "recipes" / "full.yaml")
