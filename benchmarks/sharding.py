"""Training whose weights are split over two processes, beside one process with the same global batch.

    python -m benchmarks.sharding                                  # one, zero2, zero3, fsdp2 on two GPUs
    python -m benchmarks.sharding --shape tiny --arms one zero3    # on a CPU, which has no FSDP
    python -m benchmarks.sharding --lora --shape 14b --arms fsdp2 --steps 3    # a step, its memory and its push

Each arm is a launch of its own, with its file of `accelerate_configs/`. Completions and rewards depend on the prompt,
the step and the place in the group alone, so all arms train on the same batches. It says how far losses, KL and the
saved weights differ from those of one process, how long a step takes, and how much memory a process needs.

With `--lora`, all processes share a colocated vLLM (tensor parallelism), whose completions they train on. Each process
makes the same random weights, which are never written; vLLM has others until the first push. Nothing is compared.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from benchmarks.common import (
    BETA,
    SHAPES,
    Clock,
    device,
    device_name,
    dtype,
    now,
    parser,
    quiet,
    rows_of,
    save_model,
    write_json,
)
from benchmarks.processes import sigterm_afterwards
from benchmarks.service import BRANCHES, GENERATIONS, ROOT, InstantReward
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.demo.packaged import packaged_tokenizer
from salesrl_trl.names import GPU_PEAK, Phase, time_of
from salesrl_trl.trainer import SalesGRPOTrainer
from salesrl_trl.update.ledger import kl_names

ARMS = {"one": None, "ddp": "debug", "zero2": "full", "zero3": "zero3", "fsdp2": "fsdp2"}
"""By arm, its file of `accelerate_configs/`."""
BATCH = 8
"""Completions of a micro-batch over all processes. A step has two micro-batches."""
TOKENS = {"0.5b": 128, "7b": 128, "demo": 32, "tiny": 16}
"""Longest completion."""
LIMIT_S = 300
"""Longest time of a launch. DeepSpeed compiles an op for 25 s when it is first used on a machine."""


class Keyed(SalesGRPOTrainer):
    """Generation replaced by tokens that depend on the prompt, the step and the place in the group."""

    length: int

    def _generate_single_turn(self, prompt_ids: list[Any], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        completions = []
        for place, prompt in enumerate(prompt_ids, start=self.accelerator.process_index * len(prompt_ids)):
            draw = random.Random(f"{prompt} {self.state.global_step} {place % GENERATIONS}")
            length = draw.randrange(self.length // 2, self.length + 1)
            completions.append([draw.randrange(10, 1000) for _ in range(length)])
        return completions, None


def work_of_lora(arguments: argparse.Namespace) -> None:
    """Train adapters in one process of an arm, with vLLM over all processes. The first one writes the figures."""
    rank, processes = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    where = torch.device("cuda", rank) if torch.cuda.is_available() else device()
    if where.type == "cuda":
        torch.cuda.set_device(where)
    config = SalesGRPOConfig(
        **quiet(where, str(arguments.out / "run")),
        held_out_eval=False,
        per_device_train_batch_size=BATCH // processes,
        gradient_accumulation_steps=2,
        max_completion_length=TOKENS.get(arguments.shape, 256),
        gradient_checkpointing=True,
        max_steps=arguments.steps,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_tensor_parallel_size=processes,
        vllm_gpu_memory_utilization=0.4,
        vllm_max_model_length=512,
        vllm_engine_kwargs={"enforce_eager": True, "load_format": "dummy"},
        max_sampling_logp_difference=100.0,
    )
    with where:
        torch.manual_seed(0)
        model = Qwen2ForCausalLM._from_config(AutoConfig.from_pretrained(arguments.model), dtype=dtype(where))
    model.to("cpu")  # as weights that are read: accelerate keeps whole ones until its FSDP has all shards on the GPU
    torch.cuda.empty_cache()
    model.name_or_path = model.config._name_or_path = str(arguments.model)  # where vLLM finds the architecture
    clock = Clock()
    trainer = SalesGRPOTrainer(
        model,
        InstantReward(),
        args=config,
        train_dataset=Dataset.from_list(rows_of([f"Question {index}?" for index in range(64)])),
        processing_class=packaged_tokenizer(),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        callbacks=[clock],
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    peaks = gather_object([max(entry.get(GPU_PEAK) or 0.0 for entry in steps[1:] or steps)])
    if trainer.is_world_process_zero():
        figures = {
            "distributed": trainer.accelerator.distributed_type.value,
            "processes": processes,
            "steps": [{"loss": entry["loss"], "grad_norm": entry["grad_norm"]} for entry in steps],
            "step_s": clock.seconds[1:] or clock.seconds,
            "push_s": [entry[time_of(Phase.WEIGHT_PUSH)] for entry in steps],
            "phases_s": [{each.value: entry.get(time_of(each)) for each in Phase} for entry in steps],
            "logp_difference": [entry.get("sampling/sampling_logp_difference/mean") for entry in steps],
            "peak_gib": peaks if where.type == "cuda" else [None],
        }
        write_json(arguments.out / "figures.json", figures)
    trainer.finish()
    PartialState().destroy_process_group()


def work(arguments: argparse.Namespace) -> None:
    """Train in one process of an arm. The first process writes the figures and saves the policy."""
    where, processes = device(), int(os.environ.get("WORLD_SIZE", "1"))
    config = SalesGRPOConfig(  # before the model: DeepSpeed's ZeRO-3 splits the model while it is loaded
        **quiet(where, str(arguments.out / "run")) | {"learning_rate": 1e-4, "bf16": arguments.bf16},
        branch_kl={branch: {"beta": BETA, "low": 0.02, "high": 0.06} for branch in BRANCHES},
        kl_update_steps=1,
        held_out_eval=False,
        loss_type="dapo",
        per_device_train_batch_size=BATCH // processes,
        gradient_accumulation_steps=2,
        max_completion_length=TOKENS[arguments.shape],
        gradient_checkpointing=arguments.shape in ("0.5b", "7b"),
        max_steps=arguments.steps,
    )
    rows = rows_of([f"Question {index}?" for index in range(64)])
    clock = Clock()
    trainer = Keyed(
        AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        InstantReward(),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=packaged_tokenizer(),
        callbacks=[clock],
    )
    trainer.length = TOKENS[arguments.shape]
    trainer.train()
    trainer.save_model(str(arguments.out / "saved"))
    peak = torch.cuda.max_memory_allocated() / 2**30 if where.type == "cuda" else None
    peaks = gather_object([peak])
    if trainer.is_world_process_zero():
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        names = ("loss", "grad_norm", *kl_names(BRANCHES))
        figures = {
            "distributed": trainer.accelerator.distributed_type.value,
            "processes": processes,
            "first_weights": trainer.components.policy.first_weights,
            "steps": [{name: entry[name] for name in names} for entry in steps],
            "step_s": clock.seconds[1:],
            "peak_gib": peaks,
        }
        write_json(arguments.out / "figures.json", figures)
    trainer.finish()
    PartialState().destroy_process_group()


def launch(arm: str, arguments: argparse.Namespace, model: Path, out: Path) -> dict[str, Any]:
    """The figures of an arm.

    Raises:
        `RuntimeError`: it failed. The message holds the end of its output.
    """
    out.mkdir()
    name = ARMS[arm]
    command = [sys.executable, "-m"]
    if name is not None:
        several = ("--multi_gpu",) if arm == "ddp" else ()
        command += ["accelerate.commands.launch", "--config_file", f"accelerate_configs/{name}.yaml", *several]
        command += ["--num_processes", "2", "-m"]
    command += ["benchmarks.sharding", "--worker", "--shape", arguments.shape, "--steps", str(arguments.steps)]
    command += ["--model", str(model), "--out", str(out)] + ["--bf16"] * arguments.bf16
    command += ["--lora"] * arguments.lora
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    log = out / "log.txt"
    with log.open("wb") as stream:
        ended: int | str
        try:
            with sigterm_afterwards():
                process = subprocess.Popen(
                    command, env=environment, stdout=stream, stderr=stream, start_new_session=True
                )
            ended = process.wait(arguments.limit or LIMIT_S * (1 + arguments.lora))
        except (subprocess.TimeoutExpired, SystemExit) as error:
            ended = str(error)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the processes that accelerate started, too
    if not (out / "figures.json").is_file():
        raise RuntimeError(f"{arm} failed: {ended}. {log.read_text(errors='replace')[-6000:]}")
    figures: dict[str, Any] = json.loads((out / "figures.json").read_text())
    return figures | {"exit_code": ended}  # an end that is not clean comes after the figures


def differences(one: dict[str, Any], other: dict[str, Any], saved: tuple[Path, Path]) -> dict[str, float]:
    """The largest differences over the steps, by kind of figure, and of the saved weights."""
    found = dict.fromkeys(("loss", "grad_norm", "kl"), 0.0)
    for a, b in zip(one["steps"], other["steps"], strict=True):
        for name in a:
            kind = name.split("/")[0]
            if kind in found and a[name] is not None and not name.endswith("_tokens"):
                found[kind] = max(found[kind], abs(a[name] - b[name]))
    expected, weights = (load_file(folder / "model.safetensors") for folder in saved)
    found["weights"] = max(
        (weights[name].float() - value.float()).abs().max().item() for name, value in expected.items()
    )
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the arms one after the other and print a line for each."""
    made = parser(__doc__)
    made.add_argument("--shape", choices=sorted(SHAPES), default="0.5b" if torch.cuda.is_available() else "tiny")
    made.add_argument("--arms", nargs="+", choices=sorted(ARMS), default=["one", "zero2", "zero3", "fsdp2"])
    made.add_argument("--steps", type=int, default=5)
    made.add_argument("--bf16", action="store_true", help="compute in bf16; the default is float32")
    made.add_argument("--lora", action="store_true", help="train adapters on completions of a colocated vLLM")
    made.add_argument("--limit", type=int, help="seconds of a launch")
    made.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = made.parse_args(argv)
    if arguments.worker:
        (work_of_lora if arguments.lora else work)(arguments)
        return {}
    several, cards = {*arguments.arms} - {"one"}, torch.cuda.device_count()
    if (cards == 1 and several) or (not cards and "fsdp2" in several):
        made.error(f"{', '.join(sorted(several))}: expected two GPUs, or a CPU without fsdp2; found {cards} GPUs")
    if not arguments.lora and arguments.shape not in TOKENS:
        made.error(f"--shape {arguments.shape} needs --lora. Expected otherwise: {', '.join(TOKENS)}")
    figures: dict[str, Any] = {"shape": arguments.shape, "device": device_name(device()), "bf16": arguments.bf16}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        if arguments.lora:
            Qwen2Config(**SHAPES[arguments.shape], architectures=["Qwen2ForCausalLM"]).save_pretrained(model)
            packaged_tokenizer().save_pretrained(model)
        else:
            save_model(arguments.shape, model, device())
        for arm in arguments.arms:
            started = now()
            found = launch(arm, arguments, model, Path(folder, arm))
            if "one" in figures and not arguments.lora:
                saved = (Path(folder, "one", "saved"), Path(folder, arm, "saved"))
                found["difference"] = differences(figures["one"], found, saved)
            figures[arm] = found
            print(_line(arm, found, now() - started), flush=True)
            write_json(arguments.json, figures)  # of a bench that a later arm ends, too
    return figures


def _line(arm: str, found: dict[str, Any], seconds: float) -> str:
    parts = [
        f"{arm}: {found['distributed']} on {found['processes']}",
        f"step {statistics.median(found['step_s']):.2f} s",
    ]
    if found["peak_gib"][0] is not None:
        parts.append(f"peak {max(found['peak_gib']):.2f} GiB a process")
    if "push_s" in found:
        parts.append("pushes " + ", ".join(f"{seconds:.2f}" for seconds in found["push_s"]) + " s")
        parts.append(f"log-probs off by {found['logp_difference']}")
    if "difference" in found:
        parts += [f"{name} off by {value:.2g}" for name, value in found["difference"].items()]
    else:
        parts.append("losses " + ", ".join(f"{entry['loss']:.4f}" for entry in found["steps"]))
    return "; ".join((*parts, f"launch {seconds:.0f} s, exit code {found['exit_code']}"))


if __name__ == "__main__":
    if "--worker" not in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # ends its processes too
    main()
