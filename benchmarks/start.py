"""Seconds from the beginning of a process to the end of the first optimizer step: stock TRL, and recipes/fast_load.py.

    .venv/bin/python -m benchmarks.start [--shape 7b|0.5b|tiny] [--arms stock warmup kept] [--json FILE]

The arms, in this order, each in fresh processes:

- `stock`: TRL's `GRPOTrainer` as a user would write it: vLLM in the process, LoRA, bf16, an instant reward. The caches
  of compiled code are empty.
- `warmup`: scripts/warmup_model.py for recipes/fast_load.py, with the same model and sizes.
- `kept`: that recipe with its embedded services, the page cache and the kernels of `warmup`.
- `stock_kept`: stock TRL again, with the page cache and the compiled code that the first arm left in its own folders.
- `cold`: the recipe with an empty `compile_cache_dir`.

Before `stock` and `cold` the page cache forgets the model and Python's packages, as on a machine that has just
started (`--keep-page-cache` leaves them). All byte code is compiled before. The weights are random, saved once. Each
arm trains three steps of 8 completions; a completion has its full length. The rate of generation is that of the last
step. On a CPU stock TRL generates with transformers: its weight push into vLLM fails there.
"""

import argparse
import itertools
import json
import os
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ARMS = {"stock": 120, "warmup": 100, "kept": 60, "stock_kept": 70, "cold": 95}
"""The arms in their order, with the seconds that each may take on an H200 with the 7B shape."""
STEPS = 3
COMPLETIONS = 8
SIZES = {"7b": (64, 2048), "0.5b": (64, 2048), "tiny": (16, 512)}
"""Longest completion, and longest prompt with completion."""
LORA = {"lora_r": 16, "lora_alpha": 32, "lora_target_modules": "all-linear"}
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the arms, print each, and write the file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SIZES), default="7b")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--keep-page-cache", action="store_true", help="leave files in memory before the cold arms")
    parser.add_argument("--limit-s", type=float, default=450, help="begin no arm that might end later than this")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--child", choices=("make", "stock"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child == "make":
        _make(args.shape, args.folder)
    elif args.child == "stock":
        _stock(args.shape, args.folder)
    else:
        _measure(args)


def _measure(args: argparse.Namespace) -> None:
    began, found = time.monotonic(), dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _run(folder, "make", [*_this("make", args.shape), "--folder", str(folder / "model")], {})
        print(f"made the model: {time.monotonic() - began:.0f} s", flush=True)
        for arm in (each for each in ARMS if each in args.arms):
            if time.monotonic() - began + ARMS[arm] > args.limit_s:
                print(f"{arm}: left out, it might end after {args.limit_s:.0f} s", flush=True)
                continue
            if arm in ("stock", "cold") and not args.keep_page_cache:
                forget_files([folder / "model", *_packages()])
            found[arm] = _arm(arm, args.shape, folder)
            print(line(arm, found[arm]), flush=True)
            if args.json:
                figures = {"shape": args.shape, "arms": found, "ratios": ratios(found)}
                args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        print(", ".join(f"{name} {value:.3f}" for name, value in ratios(found).items()), flush=True)


def _arm(arm: str, shape: str, folder: Path) -> dict[str, Any]:
    """The figures of one arm."""
    if arm.startswith("stock"):
        caches = {name: str(folder / "stock" / name) for name in CACHES}
        wall = _run(folder, arm, [*_this("stock", shape), "--folder", str(folder)], caches)
        return {"wall_s": wall, **json.loads((folder / "stock.json").read_text())}
    settings, output = _recipe_settings(shape, folder), folder / arm
    settings += ["--compile_cache_dir", str(folder / ("empty" if arm == "cold" else "compiled"))]
    if arm == "warmup":
        return {"wall_s": _run(folder, arm, [str(ROOT / "scripts/warmup_model.py"), *settings], {})}
    command = [str(ROOT / "recipes/fast_load.py"), *settings, "--output_dir", str(output)]
    wall = _run(folder, arm, command, {})
    start = json.loads((output / "start_up.json").read_text())
    generation = generation_s(json.loads((output / "trace.json").read_text()))
    kept = [each for each in (output / "run.log").read_text().splitlines() if "[Run] compiled" in each]
    return {
        "wall_s": wall,
        "first_step_end_s": start["total_s"],
        "phases_s": start["phases_s"] | {"first_step": start["first_step_s"]},
        "beside_s": start["beside_s"],
        "tokens_per_s": COMPLETIONS * SIZES[shape][0] / generation,
        "engine": kept[-1].rpartition(". ")[2],
    }


def generation_s(trace: list[dict[str, Any]]) -> float:
    """Seconds of the last generation in a run's trace, without the weight push that is a part of it."""

    def spans(name: str) -> list[dict[str, Any]]:
        return [each for each in trace if each.get("name") == name and each.get("ph") == "X"]

    last = spans("generation")[-1]
    end = last["ts"] + last["dur"]
    inside = [push["dur"] for push in spans("weight_push") if last["ts"] <= push["ts"] < end]
    return float(last["dur"] - sum(inside)) / 1e6


def _recipe_settings(shape: str, folder: Path) -> list[str]:
    length, model_length = SIZES[shape]
    settings = {
        "config": ROOT / "recipes/fast_load.yaml",
        "model_name_or_path": folder / "model",
        "use_peft": True,
        **LORA,
        "per_device_train_batch_size": COMPLETIONS,
        "gradient_accumulation_steps": 1,
        "num_generations": COMPLETIONS,
        "max_completion_length": length,
        "vllm_max_model_length": model_length,
        "generation_kwargs": '{"ignore_eos": true}',
        "long_prompts": "drop",
        "max_steps": STEPS,
    }
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def line(arm: str, figures: dict[str, Any]) -> str:
    """The figures of an arm for people."""
    if "first_step_end_s" not in figures:
        return f"{arm}: {figures['wall_s']:.1f} s in all"
    parts = [figures["phases_s"], figures.get("beside_s", {})]
    phases, beside = (", ".join(f"{name} {each:.1f}" for name, each in part.items() if each >= 0.05) for part in parts)
    return (
        f"{arm}: {figures['first_step_end_s']:.1f} s to the end of the first step ({phases}"
        f"{f'; beside: {beside}' if beside else ''}); {figures['tokens_per_s']:.0f} tokens/s; {figures['engine']}"
    )


def ratios(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Each arm's time to the end of the first step over that of `stock`."""
    if "stock" not in found:
        return {}
    base = found["stock"]["first_step_end_s"]
    return {
        f"{arm}/stock": each["first_step_end_s"] / base
        for arm, each in found.items()
        if "first_step_end_s" in each and arm != "stock"
    }


# Processes and the page cache


def _this(child: str, shape: str) -> list[str]:
    return ["-m", "benchmarks.start", "--child", child, "--shape", shape]


def _run(folder: Path, name: str, arguments: Sequence[str], environment: dict[str, str]) -> float:
    """Run a command with this interpreter. Returns its seconds. If it fails, the end of its output is shown.

    It writes byte code, also where the machine's images do not want it: else each process compiles all it imports.
    """
    log, began = folder / f"{name}.log", time.monotonic()
    with log.open("wb") as output:
        result = subprocess.run(
            [sys.executable, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | environment,
        )
    if result.returncode:
        sys.exit(f"{name} ended with {result.returncode}:\n{log.read_text(errors='replace')[-4000:]}")
    return time.monotonic() - began


def _packages() -> list[Path]:
    """The folders of Python's packages, and of those that PYTHONPATH adds."""
    added = [Path(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    known = [Path(each) for each in (*site.getsitepackages(), sysconfig.get_path("purelib"))]
    return list(dict.fromkeys(each for each in (*known, *added) if each.is_dir() and each != ROOT))


def _files(folder: Path) -> Iterator[Path]:
    return (Path(path) / name for path, _, names in os.walk(folder) for name in names)


def forget_files(folders: Sequence[Path]) -> None:
    """Let the page cache forget all files of the folders that no process has mapped."""
    os.sync()
    for file in (each for folder in folders for each in _files(folder) if each.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


# What the children do. Their imports count where they are measured, and nowhere else


def _make(shape: str, folder: Path) -> None:
    """Save random weights. Imports what the arms import, so that byte code is there."""
    from transformers import set_seed

    import salesrl_trl.trainer  # noqa: F401
    from benchmarks.common import device, save_model

    set_seed(0)
    save_model(shape, folder, device())


def _stock(shape: str, folder: Path) -> None:
    """Train with TRL alone, and write the seconds."""
    from salesrl_trl.telemetry.instruments import imports_so_far

    clock = [("python", time.time() - imports_so_far().seconds)]

    def mark(name: str) -> None:
        clock.append((name, time.time()))

    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    mark("imports")
    on_gpu, (length, model_length) = torch.cuda.is_available(), SIZES[shape]

    class Clock(TrainerCallback):
        """The ends of the steps."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            mark("prepare")

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            mark("first_step")

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [len(str(each)) % 100 / 100 for each in completions]

    settings = GRPOConfig(
        output_dir=str(folder / "stock_run"),
        model_init_kwargs={"dtype": "bfloat16" if on_gpu else "float32"},  # TRL's default is float32
        use_cpu=not on_gpu,
        bf16=on_gpu,
        gradient_checkpointing=True,
        use_vllm=on_gpu,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.35,
        vllm_max_model_length=model_length,
        per_device_train_batch_size=COMPLETIONS,
        gradient_accumulation_steps=1,
        num_generations=COMPLETIONS,
        max_completion_length=length,
        generation_kwargs={"ignore_eos": True} if on_gpu else None,
        max_steps=STEPS,
        learning_rate=1e-6,
        beta=0.04,
        logging_steps=1,
        report_to="tensorboard",
        save_strategy="no",
    )
    rows = [{"prompt": [{"role": "user", "content": f"Which course suits me? Number {i}."}]} for i in range(64)]
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
        peft_config=LoraConfig(r=LORA["lora_r"], lora_alpha=LORA["lora_alpha"], target_modules="all-linear"),
    )
    mark("policy_and_engine")
    owner, name = (trainer.vllm_generation, "generate") if on_gpu else (trainer, "_generate_single_turn")
    generate, seconds = getattr(owner, name), list[float]()

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = generate(*args, **kwargs)
        seconds.append(time.perf_counter() - began)
        return result

    setattr(owner, name, timed)
    trainer.train()
    phases = {name: end - start for (_, start), (name, end) in itertools.pairwise(clock[:5])}
    figures = {
        "first_step_end_s": sum(phases.values()),
        "phases_s": phases,
        "tokens_per_s": COMPLETIONS * length / seconds[-1],
        "engine": "vLLM with CUDA graphs" if on_gpu else "transformers",
    }
    (folder / "stock.json").write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
