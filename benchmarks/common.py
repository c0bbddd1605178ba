"""Parts that several benches share: shapes of models, a trainer that only trains, a clock, ratios, the command line.

Owns nothing that only one bench needs, and no service (`service`, `vllm_server`).
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.autograd import DeviceType
from torch.profiler import profile
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.service import BRANCHES, GENERATIONS, InstantReward
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.demo.packaged import packaged_tokenizer
from salesrl_trl.ground.process import write_whole
from salesrl_trl.telemetry.instruments import Instruments
from salesrl_trl.trainer import SalesGRPOTrainer

BETA = 0.04
SHAPES: dict[str, dict[str, Any]] = {
    # Qwen2.5-0.5B
    "0.5b": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    # Qwen2.5-1.5B
    "1.5b": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    # Qwen2.5-3B
    "3b": {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    # Qwen2.5-7B
    "7b": {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    # Qwen2.5-14B
    "14b": {
        "vocab_size": 152_064,
        "hidden_size": 5120,
        "intermediate_size": 13_824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    # Qwen2.5-32B
    "32b": {
        "vocab_size": 152_064,
        "hidden_size": 5120,
        "intermediate_size": 27_648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    # the demo's policy
    "demo": {
        "vocab_size": 3072,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "vocab_size": 3072,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,  # heads of 32, the smallest that vLLM takes on a CPU
    },
}
TOKENS = {"0.5b": 512, "1.5b": 512, "3b": 512, "7b": 512, "demo": 32, "tiny": 16}
"""Longest completion of a trainer that only trains. The shortest is half as long."""
BATCH = {"0.5b": (16, 4), "1.5b": (16, 4), "3b": (8, 8), "7b": (8, 8), "demo": (48, 1), "tiny": (8, 2)}
"""Completions of a micro-batch, and micro-batches of an update, for such a trainer."""


# The machine


def device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def device_name(device: torch.device) -> str:
    """The name of the GPU, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def allocated() -> int:
    """Bytes of PyTorch's tensors on the GPU. Starts its peak anew."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak() -> int:
    """The highest number of such bytes since `allocated`."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def now() -> float:
    """Seconds, after the GPU has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def save_model(shape: str, folder: Path, device: torch.device) -> Path:
    """Random weights of a shape, with the demo's tokenizer. Made on `device`, where that is quicker."""
    with device:
        model = Qwen2ForCausalLM._from_config(Qwen2Config(**SHAPES[shape]), dtype=dtype(device))
    model.save_pretrained(folder)
    packaged_tokenizer().save_pretrained(folder)
    return folder


def in_a_process(bench: str, words: Sequence[str], log: Path) -> bool:
    """Run a bench in a process of its own, with its output in `log`. Where it fails, print the end of it. Returns
    whether it worked."""
    with log.open("w") as stream:
        command = [sys.executable, "-m", f"benchmarks.{bench}", *words]
        code = subprocess.run(command, stdout=stream, stderr=stream, check=False).returncode
    if code:
        print(f"{log.stem} ended with {code}", log.read_text()[-3000:], flush=True)
    return code == 0


def alone(work: Callable[..., Any], *given: Any) -> Any:
    """What a function returns in a new process, which leaves nothing on the GPU. Raises the function's error, or
    `BrokenProcessPool` if the process dies."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


KERNELS = {"attention": "flash|fmha|attention|sdpa", "matrix products": "gemm|gemv|nvjet|cutlass|xmma|splitk"}
"""Kinds of kernels, by words in their names. The first one counts."""


def kernels(found: profile, per: int = 1, *, prints: bool = False) -> dict[str, float]:
    """Milliseconds of the GPU by kind of kernel, in a profile of so many equal parts. `prints`: the longest, too."""
    each = [
        event
        for event in found.key_averages()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    sums: Counter[str] = Counter()
    for event in sorted(each, key=lambda event: -event.self_device_time_total):
        ms, name = event.self_device_time_total / 1000 / per, event.key
        sums[next((kind for kind, words in KERNELS.items() if re.search(words, name.lower())), "others")] += ms
        if prints and ms > 0.01 * sum(sums.values()):
            print(f"  {ms:8.3f} ms {event.count / per:7.1f} x {name[:100]}")
    if prints:
        print(
            f"  {sum(sums.values()):8.3f} ms: {', '.join(f'{kind} {ms:.3f}' for kind, ms in sums.items())}", flush=True
        )
    return dict(sums)


# Training without generation and without services


class Clock(TrainerCallback):
    """Seconds of each update."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(now() - self._started)


class RandomTokens:
    """Generation replaced by tokens from a seed. Goes before the trainer among the bases."""

    length: int
    """Longest completion."""

    def _generate_single_turn(self, prompt_ids: list[Any], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        draw = random.Random(self.state.global_step)  # type: ignore[attr-defined]
        lengths = [draw.randrange(self.length // 2, self.length + 1) for _ in prompt_ids]
        return [[draw.randrange(10, 1000) for _ in range(length)] for length in lengths], None


class Stock(RandomTokens, GRPOTrainer):
    """TRL's trainer."""


class Branched(RandomTokens, SalesGRPOTrainer):
    """This package's trainer."""


def quiet(device: torch.device, output_dir: str, **settings: Any) -> dict[str, Any]:
    """Settings of a run that writes nothing and prints nothing."""
    on_gpu = device.type == "cuda"
    return {
        "output_dir": output_dir, "use_cpu": not on_gpu, "bf16": on_gpu, "num_generations": GENERATIONS,
        "learning_rate": 1e-6, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        **settings,
    }  # fmt: skip


def build_trainer(
    branched: bool,
    shape: str,
    model_dir: Path,
    output_dir: str,
    updates: int,
    callback: TrainerCallback,
    reward: InstantReward | None = None,
    instruments: Instruments | None = None,
) -> Stock | Branched:
    """A trainer that only trains: stock TRL's with one KL coefficient, or this package's with one for each branch."""
    where = device()
    micro_batch, micro_batches = BATCH[shape]
    settings = quiet(
        where,
        output_dir,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=micro_batches,
        max_completion_length=TOKENS[shape],
        gradient_checkpointing=shape in ("0.5b", "7b"),
        max_steps=updates,
    )
    rows = rows_of(["Hi"] * 64)
    model, reward = Qwen2ForCausalLM.from_pretrained(model_dir, dtype=dtype(where)), reward or InstantReward()
    common: dict[str, Any] = {
        "train_dataset": Dataset.from_list(rows),
        "processing_class": packaged_tokenizer(),
        "callbacks": [callback],
    }
    trainer: Stock | Branched
    if branched:
        bands = {branch: {"beta": BETA, "low": 0.02, "high": 0.06} for branch in BRANCHES}
        config = SalesGRPOConfig(branch_kl=bands, kl_update_steps=1, held_out_eval=False, **settings)
        trainer = Branched(model, reward, args=config, instruments=instruments, **common)
    else:
        trainer = Stock(model, reward, args=GRPOConfig(beta=BETA, **settings), **common)
    trainer.length = TOKENS[shape]
    return trainer


def rows_of(texts: Sequence[str]) -> list[dict[str, object]]:
    """Rows of a dataset, in the branches by turns."""
    return [
        {"prompt": [{"role": "user", "content": text}], "row": index, "branch": BRANCHES[index % len(BRANCHES)]}
        for index, text in enumerate(texts)
    ]


# Figures and the command line


def ratios(rounds: Mapping[str, Sequence[Sequence[float]]], arm: str, base: str) -> dict[str, Any]:
    """An arm's step time over that of `base`, by the medians of each round.

    Args:
        rounds (`Mapping[str, Sequence[Sequence[float]]]`):
            By arm, the seconds of the steps of each round.
    """
    medians = {name: [statistics.median(seconds) for seconds in rounds[name]] for name in (base, arm)}
    found = [one / other for one, other in zip(medians[arm], medians[base], strict=True)]
    return {
        "rounds": len(found),
        "median_s": {name: statistics.median(each) for name, each in medians.items()},
        "ratio": statistics.median(found),
        "ratios": found,
    }


def ratio_line(figures: dict[str, Any]) -> str:
    """The figures of `ratios` for people."""
    medians = ", ".join(f"{arm} {seconds:.4f} s" for arm, seconds in figures["median_s"].items())
    least, most = min(figures["ratios"]), max(figures["ratios"])
    return (
        f"{figures['device']}, {figures['shape']}, {figures['rounds']} rounds: {medians}, "
        f"ratio {figures['ratio']:.4f} ({least:.4f} to {most:.4f})"
    )


def parser(description: str | None) -> argparse.ArgumentParser:
    """A bench's command line, which may ask for a file of all figures."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help="write all figures to this file")
    return made


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the file of figures, if one was asked for. A bench that is killed meanwhile leaves the earlier one."""
    if path:
        write_whole(path, json.dumps(figures, indent=2) + "\n")


def run_in_rounds(
    argv: Sequence[str] | None,
    description: str | None,
    measure: Callable[[str, int, int], dict[str, Any]],
    on_cpu: str,
    updates: int,
) -> dict[str, Any]:
    """The figures of `measure(shape, updates, rounds)`, with the arguments of the command line.

    Args:
        on_cpu (`str`):
            The default shape without a GPU.
        updates (`int`):
            The default updates of a block.
    """
    made = parser(description)
    made.add_argument("--shape", choices=sorted(SHAPES), default="0.5b" if torch.cuda.is_available() else on_cpu)
    made.add_argument("--updates", type=int, default=updates, help="updates of a block; the first is not counted")
    made.add_argument("--rounds", type=int, default=10, help="rounds of four blocks each")
    args = made.parse_args(argv)
    figures = {"shape": args.shape, "device": device_name(device())}
    figures |= measure(args.shape, args.updates, args.rounds)
    write_json(args.json, figures)
    return figures


def set_lookahead(trainer: Any, ahead: int) -> None:
    """For the next run of a trainer."""
    pipeline = trainer.components.pipeline
    pipeline.turns.lookahead = ahead
    pipeline.updates.depth = ahead + 1
