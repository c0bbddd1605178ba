#!/usr/bin/env python3
"""What the branches' KL costs: step time of this trainer beside stock TRL's with one coefficient, in one run.

    .venv/bin/python scripts/bench_kl.py [--shape 0.5b|tiny] [--updates 5] [--rounds 10] [--json FILE]

Both train the same random weights on the same completions of random tokens, made in no time and scored in no time, so
a step is log-probs of policy and reference, loss, backward pass and optimizer alone: generation or services would only
hide a difference. Blocks of updates alternate (stock, branches, branches, stock, ...), each update is timed with the
device synchronised at its end, and the first of each block is left out. Four blocks are a round; the figure is the
median over rounds of the round's time with branches over its time with stock TRL.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_rewards import BRANCHES, InstantReward
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.demo.policy import build_tokenizer
from salesrl_trl.telemetry.instruments import Instruments
from salesrl_trl.trainer import SalesGRPOTrainer

SHAPES = {
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
    "tiny": {
        "vocab_size": 3072,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
}
BETA = 0.04
TOKENS = {"0.5b": 512, "tiny": 16}
"""Most tokens of a completion; the least are half as many."""
BATCH = {"0.5b": (16, 4), "tiny": (8, 2)}
"""Completions of a micro-batch, micro-batches of an update."""


class RandomTokens:
    """Generation replaced by tokens from a seed."""

    length: int

    def _generate_single_turn(self, prompt_ids: list[Any], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        draw = random.Random(self.state.global_step)  # type: ignore[attr-defined]
        lengths = [draw.randrange(self.length // 2, self.length + 1) for _ in prompt_ids]
        return [[draw.randrange(10, 1000) for _ in range(length)] for length in lengths], None


class Stock(RandomTokens, GRPOTrainer):
    """TRL's trainer."""


class Branched(RandomTokens, SalesGRPOTrainer):
    """This package's."""


class Clock(TrainerCallback):
    """Seconds of each update."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._started)


def build(
    arm: str,
    shape: str,
    model_dir: str,
    output_dir: str,
    updates: int,
    reward: InstantReward | None = None,
    instruments: Instruments | None = None,
) -> GRPOTrainer:
    """A trainer of one arm, with nothing else to do than to train."""
    settings: dict[str, Any] = {
        "output_dir": output_dir,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": torch.cuda.is_available(),
        "per_device_train_batch_size": BATCH[shape][0],
        "gradient_accumulation_steps": BATCH[shape][1],
        "num_generations": 8,
        "max_completion_length": TOKENS[shape],
        "gradient_checkpointing": shape in ("0.5b", "7b"),
        "learning_rate": 1e-6,
        "max_steps": updates,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    model = Qwen2ForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16 if settings["bf16"] else torch.float32)
    rows = [{"prompt": [{"role": "user", "content": "Hi"}], "row": index} for index in range(64)]
    common = {"train_dataset": Dataset.from_list(rows), "processing_class": build_tokenizer(), "callbacks": [Clock()]}
    trainer: GRPOTrainer
    if arm == "stock":
        trainer = Stock(
            model, reward_funcs=reward or InstantReward(), args=GRPOConfig(beta=BETA, **settings), **common
        )
    else:
        bands = {branch: {"beta": BETA, "low": 0.02, "high": 0.06} for branch in BRANCHES}
        config = SalesGRPOConfig(branch_kl=bands, kl_update_steps=1, held_out_eval=False, **settings)
        trainer = Branched(model, reward or InstantReward(), config, instruments=instruments, **common)
    trainer.length = TOKENS[shape]
    return trainer


def measure(shape: str, updates: int, rounds: int) -> dict[str, Any]:
    """Step times by arm, and their ratio."""
    set_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = f"{scratch}/model"
        Qwen2ForCausalLM(Qwen2Config(**SHAPES[shape])).save_pretrained(model_dir)
        trainers = {arm: build(arm, shape, model_dir, f"{scratch}/{arm}", updates) for arm in ("stock", "branches")}
        seconds: dict[str, list[list[float]]] = {arm: [] for arm in trainers}
        clocks = {arm: _clock(trainer) for arm, trainer in trainers.items()}
        for arm in ("stock", "branches"):  # once to warm up
            trainers[arm].train()
        for _ in range(rounds):
            for times in seconds.values():
                times.append([])
            for arm in ("stock", "branches", "branches", "stock"):
                clocks[arm].seconds.clear()
                trainers[arm].train()
                seconds[arm][-1] += clocks[arm].seconds[1:]
    by_round = {arm: [statistics.median(times) for times in rounds] for arm, rounds in seconds.items()}
    ratios = [branches / stock for branches, stock in zip(by_round["branches"], by_round["stock"], strict=True)]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "shape": shape,
        "device": device,
        "rounds": rounds,
        "median_s": {arm: statistics.median(times) for arm, times in by_round.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "seconds": seconds,
    }


def _clock(trainer: GRPOTrainer) -> Clock:
    return next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Clock))


def run_bench(
    argv: Sequence[str] | None,
    description: str | None,
    measure: Callable[[str, int, int], dict[str, Any]],
    shape: str,
    updates: int,
) -> dict[str, Any]:
    """The figures of `measure(shape, updates, rounds)` by the command line, which may ask for a file of them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b" if torch.cuda.is_available() else shape)
    parser.add_argument(
        "--updates", type=int, default=updates, help="updates in a block, the first of which is left out"
    )
    parser.add_argument("--rounds", type=int, default=10, help="of four blocks each")
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args(argv)
    figures = measure(args.shape, args.updates, args.rounds)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and tell."""
    figures = run_bench(argv, __doc__, measure, "tiny", 5)
    medians, ratios = figures["median_s"], figures["ratios"]
    print(f"{figures['device']}, {figures['shape']}, {figures['rounds']} rounds: stock TRL {medians['stock']:.4f} s, "
          f"branches {medians['branches']:.4f} s, ratio {figures['ratio']:.4f} "
          f"({min(ratios):.4f} to {max(ratios):.4f})")  # fmt: skip


if __name__ == "__main__":
    main()
