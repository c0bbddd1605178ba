"""The memory estimate against the measured peak, and what settings cost, for random weights of real shapes.

    .venv/bin/python -m benchmarks.memory [--shapes 0.5b 7b] [--no-vllm] [--json FILE]    # on a GPU
    .venv/bin/python -m benchmarks.memory --settings --shapes 7b                        # seconds of an update
    .venv/bin/python -m benchmarks.memory --long --shapes 7b                            # completions of 4,096 tokens
    .venv/bin/python -m benchmarks.memory --shapes tiny                                 # on a CPU: no figures

Each row is a few updates of two micro-batches through this package's trainer, without services, with prompts of one
length and completions of full length. One completion is shorter, so that there is padding. A row without
`checkpointing` has no gradient checkpointing. Rows have `shared_prompts: off`, but for those that say so. `reference`
says whether there is a second model. The last row has vLLM in the process. On a GPU each row has a process of its own,
and fails where the GPU's memory is in use before it.

`--settings` takes other rows: the first one with each of attention, compiler, checkpointing and precision changed.

`--long` takes six rows with completions of 4,096 tokens on cards of 80 and 24 GB: PyTorch's allocator gets no more
than such a card less the CUDA context, and vLLM its share of it. A row that runs out of memory says so, and whether
the estimate did.

- `allocated`: PyTorch's peak, as the trainer logs it (it starts anew at each log line);
- `reserved`: the peak of what PyTorch's allocator took from the device;
- `used`: the memory of the device that is not free after the row, against the whole estimate. Nobody else may use it;
- an update's seconds: the median of all updates but the first two.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trl.trainer.grpo_trainer as upstream
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import ModelConfig, get_peft_config

from benchmarks.common import (
    BETA,
    SHAPES,
    TOKENS,
    Branched,
    Clock,
    alone,
    device,
    device_name,
    parser,
    quiet,
    save_model,
    write_json,
)
from benchmarks.service import GENERATIONS, InstantReward
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.demo.packaged import packaged_tokenizer
from salesrl_trl.ground.process import patched
from salesrl_trl.launch.checks.model import FLASH
from salesrl_trl.launch.memory_estimate import (
    CONTEXT_GIB,
    STOCHASTIC_OPTIM,
    Estimate,
    ModelShape,
    Setup,
    estimate,
    shape_of,
)
from salesrl_trl.launch.preflight.memory import STOCHASTIC_ARGS
from salesrl_trl.names import GPU_PEAK
from salesrl_trl.telemetry.device import GIB
from salesrl_trl.trainer import SalesGRPOTrainer

SENTENCE = "The course on data analysis begins in October and has two evenings in a week. "
BATCH = {"0.5b": 16, "1.5b": 8, "7b": 4, "tiny": 8}
"""Completions of a micro-batch."""


@dataclass(frozen=True)
class Row:
    """A run to measure."""

    shape: str
    lora: bool
    dtype: str = "bfloat16"
    checkpointing: bool = True
    kept: int = 0  # `kept_activations_gib`
    reference: bool = True
    vllm: bool = False
    attention: str = "sdpa"
    compiled: bool = False
    bf16_passes: bool = True
    shared: bool = False
    updates: int = 2
    completion: int = 0  # tokens; 0 for the shape's
    batch: int = 0  # completions of a micro-batch; 0 for the shape's
    card_gb: float = 0.0  # the card's memory, in 1e9 bytes; 0 for all of it

    @property
    def name(self) -> str:
        words = [self.shape, "LoRA" if self.lora else "full", self.dtype]
        words += ["8-bit AdamW"] * self.rounds + ["no checkpointing"] * (not self.checkpointing)
        words += [f"{self.kept} GiB kept"] * (self.kept > 0)
        words += ["reference"] * (self.reference and not self.lora) + ["vLLM"] * self.vllm
        words += [self.attention] * (self.attention != "sdpa") + ["torch_compile"] * self.compiled
        words += ["float32 passes"] * (not self.bf16_passes) + ["shared prompts"] * self.shared
        words += [f"{self.completions} x {self.tokens} tokens on {self.card_gb:g} GB"] * (self.card_gb > 0)
        return ", ".join(words)

    @property
    def tokens(self) -> int:
        """Of a completion."""
        return self.completion or TOKENS[self.shape]

    @property
    def completions(self) -> int:
        """Of a micro-batch."""
        return self.batch or BATCH[self.shape]

    def card_gib(self, whole: float) -> float:
        """The memory that the row may use, of a card with `whole`."""
        return min(self.card_gb * 1e9 / GIB, whole) if self.card_gb else whole

    @property
    def rounds(self) -> bool:
        """Whether the optimizer rounds stochastically."""
        return not self.lora and self.dtype == "bfloat16"


def rows_of(shapes: Sequence[str], with_vllm: bool) -> list[Row]:
    """LoRA and all weights of each shape. 7B in float32 leaves no room for a reference on a card of 141 GB."""
    rows = []
    for shape in shapes:
        rows += [Row(shape, lora=True), Row(shape, lora=False, dtype="float32", reference=shape != "7b")]
        if shape == "0.5b":
            rows += [dataclasses.replace(row, checkpointing=False) for row in rows[-2:]]
        rows += [dataclasses.replace(row, shared=True) for row in rows if row.shape == shape]
        if shape == "7b" and importlib.util.find_spec("torchao"):
            rows.append(Row(shape, lora=False))
    return rows + [Row(shapes[0], lora=True, vllm=True)] * with_vllm


def rows_of_settings(shapes: Sequence[str]) -> list[Row]:
    """LoRA of each shape as the recipes train it, and with one setting changed. All weights in two precisions."""
    changes: list[dict[str, Any]] = [{}, {"checkpointing": False}, {"attention": "eager"}, {"compiled": True}]
    changes += [{"kept": 8}]
    flash = [name for name, (is_there, *_) in FLASH.items() if torch.cuda.is_available() and is_there()]
    changes += [{"attention": name} for name in flash]
    rows = []
    for shape in shapes:
        rows += [Row(shape, lora=True, updates=6, **change) for change in changes]
        if shape != "7b":
            full = Row(shape, lora=False, dtype="float32", updates=6)
            rows += [full, dataclasses.replace(full, bf16_passes=False)]
    return rows


def rows_of_long(shapes: Sequence[str], tokens: int) -> list[Row]:
    """Six settings of LoRA with completions of so many tokens. The last one is not expected to fit."""
    rows = []
    for shape in shapes:
        large, small = Row(shape, lora=True, completion=tokens, batch=4, card_gb=80), (24.0, 1)
        rows += [large, dataclasses.replace(large, shared=True), dataclasses.replace(large, vllm=True)]
        rows += [dataclasses.replace(large, shared=True, kept=24)]
        rows += [dataclasses.replace(large, card_gb=small[0], batch=batch) for batch in (small[1], 4)]
    return rows


class FullLength(Branched):
    """Every completion has the full length but the first one."""

    def _generate_single_turn(self, prompt_ids: list[Any], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        lengths = [self.length // 2] + [self.length] * (len(prompt_ids) - 1)
        return [[10 + place % 1000 for place in range(length)] for length in lengths], None


def build(row: Row) -> Qwen2ForCausalLM:
    """Random weights, made on the device."""
    with device():
        return Qwen2ForCausalLM._from_config(
            Qwen2Config(**SHAPES[row.shape]), dtype=getattr(torch, row.dtype), attn_implementation=row.attention
        )


def figures_of(shape: str, lora: ModelConfig) -> ModelShape:
    """The figures of a shape, with its adapters."""
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPES[shape]))
    figures = shape_of(model, lora)
    assert figures is not None
    return figures


def share_of_card(row: Row) -> float:
    """The share of this card that the row may use."""
    whole = torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else 80.0
    return row.card_gib(whole) / whole


def settings_of(row: Row, where: torch.device, folder: Path) -> tuple[SalesGRPOConfig, ModelConfig]:
    """The settings of a row, and those of its model."""
    engine: dict[str, Any] = {}
    if row.vllm:
        engine = {
            "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3 * share_of_card(row),
            "vllm_engine_kwargs": {"enforce_eager": True, "load_format": "dummy"},
            "vllm_max_model_length": max(2048, row.tokens + 1024), "max_sampling_logp_difference": 100.0,
        }  # fmt: skip
    args = SalesGRPOConfig(
        **quiet(where, str(folder / "out"), **engine, **({} if row.bf16_passes else {"bf16": False})),
        per_device_train_batch_size=row.completions,
        gradient_accumulation_steps=max(2, GENERATIONS // row.completions),
        max_completion_length=row.tokens,
        gradient_checkpointing=row.checkpointing,
        kept_activations_gib=row.kept,
        torch_compile=row.compiled,
        shared_prompts="auto" if row.shared else "off",
        max_steps=row.updates,
        beta=BETA if row.reference else 0.0,
        held_out_eval=False,
        **({"optim": STOCHASTIC_OPTIM, "optim_args": STOCHASTIC_ARGS} if row.rounds else {}),
    )
    return args, ModelConfig(use_peft=row.lora, dtype=row.dtype, attn_implementation=row.attention)


def prompt_of(row: Row, place: int = 0) -> list[dict[str, str]]:
    """The prompt of a row's completions, another one at each place."""
    return [{"role": "user", "content": f"{10 + place}. " + SENTENCE * (1 if row.shape == "tiny" else 16)}]


@contextlib.contextmanager
def trainer_of(row: Row, folder: Path, clock: Clock) -> Iterator[tuple[SalesGRPOTrainer, ModelConfig]]:
    """A trainer for a row, and the model's settings. Without vLLM completions are given, and no model is read."""
    where = device()
    args, model_settings = settings_of(row, where, folder)
    if row.vllm:
        save_model(row.shape, folder / "model", where)
        policy = Qwen2ForCausalLM.from_pretrained(folder / "model", dtype=getattr(torch, row.dtype))
    else:
        policy = build(row)
    with patched(upstream, "create_model_from_path", lambda *_, **__: build(row)):
        trainer = (SalesGRPOTrainer if row.vllm else FullLength)(
            policy,
            InstantReward(),
            args=args,
            train_dataset=Dataset.from_list([{"prompt": prompt_of(row, index), "row": index} for index in range(64)]),
            processing_class=packaged_tokenizer(),
            peft_config=get_peft_config(model_settings),
            callbacks=[clock],
        )
    if isinstance(trainer, FullLength):
        trainer.length = row.tokens
    try:
        yield trainer, model_settings
    finally:
        trainer.finish()


def estimate_of(row: Row, args: SalesGRPOConfig, model_settings: ModelConfig, card_gib: float) -> Estimate:
    """The estimate of a row, for a card with so much memory."""
    shape = figures_of(row.shape, model_settings)
    tokens = packaged_tokenizer().apply_chat_template(prompt_of(row), add_generation_prompt=True, return_dict=True)
    setup = Setup(
        training=args, model=model_settings, shape=shape, card_gib=card_gib, prompt_tokens=len(tokens["input_ids"]),
        dtype=row.dtype, optim=args.optim.value,
    )  # fmt: skip
    return estimate(setup)


def check_empty(free: int, total: int) -> None:
    """Raise `RuntimeError` if more of the device's bytes are in use than an empty process has there: a row's figures
    would count them."""
    if (used := (total - free) / GIB) > CONTEXT_GIB + 0.25:
        raise RuntimeError(f"{used:.2f} GiB of the GPU are in use before the row")


def measure(row: Row) -> dict[str, Any]:
    """Train a row. Without a GPU there are no measured figures."""
    start, on_gpu = time.perf_counter(), torch.cuda.is_available()
    if on_gpu:
        whole = torch.cuda.get_device_properties(0).total_memory / GIB
        allowed = row.card_gib(whole) - CONTEXT_GIB if row.card_gb else whole
        torch.cuda.set_per_process_memory_fraction(min(allowed / whole, 1.0))
        check_empty(*torch.cuda.mem_get_info())
    clock, ran_out = Clock(), False
    with tempfile.TemporaryDirectory() as folder, trainer_of(row, Path(folder), clock) as (trainer, model_settings):
        try:
            trainer.train()
        except torch.OutOfMemoryError:
            ran_out = True
        card = torch.cuda.get_device_properties(0).total_memory / GIB if on_gpu else 80.0
        found = estimate_of(row, trainer.args, model_settings, card)
        figures = {"row": row.name, "device": device_name(device()), "estimated_gib": found.needed_gib}
        figures |= {"moment": found.peak.name, "parts_gib": dict(found.peak.parts)}
        figures |= {"fits": found.needed_gib <= row.card_gib(card), "ran_out": ran_out}
        if on_gpu:
            free, total = torch.cuda.mem_get_info()
            figures |= {
                "allocated_gib": max([entry.get(GPU_PEAK, 0.0) for entry in trainer.state.log_history], default=0.0),
                "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
                "used_gib": (total - free) / GIB,
            }
    if len(clock.seconds) > 2:
        figures["update_s"] = statistics.median(clock.seconds[2:])
    figures["seconds"] = time.perf_counter() - start
    return figures


def line(figures: dict[str, Any]) -> str:
    """The figures of a row, for people."""
    if "failed" in figures:
        return f"{figures['row']}: failed, {figures['failed']}"
    told = f"{figures['row']}: estimated {figures['estimated_gib']:.2f} GiB ({figures['moment']})"
    told += "" if figures["fits"] else "; by the estimate it does not fit"
    told += "; it ran OUT OF MEMORY" if figures["ran_out"] else ""
    if "allocated_gib" in figures:
        told += f"; measured {figures['allocated_gib']:.2f} allocated, "
        told += f"{figures['reserved_gib']:.2f} reserved, {figures['used_gib']:.2f} used "
        told += f"(estimate {figures['estimated_gib'] / figures['used_gib'] - 1:+.1%})"
    else:
        told += "; a CPU measures nothing"
    if "update_s" in figures:
        told += f"; an update {figures['update_s']:.3f} s"
    return f"{told}; {figures['seconds']:.0f} s"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure the rows and print them."""
    made: argparse.ArgumentParser = parser(__doc__)
    on_gpu = torch.cuda.is_available()
    default = ["0.5b", "1.5b", "7b"] if on_gpu else ["tiny"]
    made.add_argument("--shapes", nargs="+", choices=sorted(BATCH), default=default)
    made.add_argument("--no-vllm", action="store_true", help="leave out the row with vLLM")
    made.add_argument("--settings", action="store_true", help="rows with one setting changed, and their seconds")
    made.add_argument("--long", action="store_true", help="six rows of long completions on cards of 80 and 24 GB")
    made.add_argument("--tokens", type=int, default=4096, help="of these completions")
    made.add_argument("--only", default="", metavar="WORDS", help="rows with these words in their names")
    args = made.parse_args(argv)
    with_vllm = on_gpu and not args.no_vllm
    wanted = rows_of_settings(args.shapes) if args.settings else rows_of(args.shapes, with_vllm)
    if args.long:
        wanted = [row for row in rows_of_long(args.shapes, args.tokens) if on_gpu or not row.vllm]
    wanted = [row for row in wanted if args.only in row.name]
    measured = functools.partial(alone, measure) if on_gpu else measure  # this process never uses the GPU
    show = functools.partial(print, file=sys.stderr, flush=True)
    rows = []
    for row in wanted:
        try:
            rows.append(measured(row))
        except Exception as error:  # the rows behind it are measured nevertheless
            rows.append({"row": row.name, "failed": f"{type(error).__name__}: {error}"[:1000]})
        show(line(rows[-1]))
        write_json(args.json, {"rows": rows})  # of a bench that a later row ends, too
    return {"rows": rows}


if __name__ == "__main__":
    main()
