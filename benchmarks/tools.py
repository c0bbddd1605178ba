"""Conversations with tools: stock TRL against this package, with tools that wait and tools that answer at once.

    .venv/bin/python -m benchmarks.tools [--shape 7b|tiny] [--arms stock ours_0 ours_2] [--seconds 1.0] [--json FILE]
    .venv/bin/python -m benchmarks.tools --customer [--seconds 2.0]     # conversations of six turns with a customer

The same for every arm:

- random weights of a real shape with an adapter, or all weights of a tiny one on a CPU, where transformers generates;
- 64 conversations a step in groups of 8. Each calls an async tool three times and then answers: four turns of
  `--tokens` tokens. The calls are scripted, since random weights call nothing: TRL's `parse_response` returns them;
- a reward that answers at once.

`ours_N` is this package's trainer with `rollout_lookahead: N`. Every arm is a process of its own. It takes steps with
instant tools first, then steps with slow ones. A step lasts from the end of the one before to its own. The first N + 2
steps of each kind are not counted, nor the last N. Stock TRL takes one slow step, which instant ones have warmed up.
An arm that is cut off leaves its counted steps, whose number stands behind their mean.

With `--customer`, a partner answers each of six turns in place of the tool, and vLLM generates on a CPU too. Stock TRL
has no partners. Its loop makes one call after the other, so that its step is calculated: ours with an instant customer
and a lookahead of 0, and the seconds of all replies.
"""

import argparse
import asyncio
import itertools
import json
import math
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import trl
import trl.trainer.grpo_trainer as upstream
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.common import (
    device,
    device_name,
    dtype,
    in_a_process,
    now,
    parser,
    quiet,
    rows_of,
    save_model,
    write_json,
)
from salesrl_trl.agents import chat_turns
from salesrl_trl.agents.partner import Message, Partner, Reply
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.demo.packaged import packaged_tokenizer
from salesrl_trl.reward.functions import per_completion
from salesrl_trl.trainer import SalesGRPOTrainer
from salesrl_trl.types import Example

CALLS, TURNS, GROUP = 3, 6, 8
ARMS = ("stock", "ours_0", "ours_1", "ours_2", "ours_4")
waiting_s = 0.0


async def search(query: str) -> str:
    """Searches.

    Args:
        query: What for.

    Returns:
        What was found.
    """
    await asyncio.sleep(waiting_s)
    return f"Nothing was found about {query}."


class Customer(Partner):
    """Answers every turn, and ends no conversation."""

    max_turns = TURNS

    async def reply(self, row: Example, messages: Sequence[Message]) -> Reply:
        await asyncio.sleep(waiting_s)
        return Reply(text="And what else is in it?")


def parsed(tokenizer: Any, ids: Sequence[int], prefix: Sequence[int] = (), tools: object = None) -> dict[str, Any]:
    """A turn's message, with a call in the first turns of a conversation."""
    message: dict[str, Any] = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
    if tokenizer.decode(prefix).count("<tool_response>") < CALLS:
        message["tool_calls"] = [{"type": "function", "function": {"name": "search", "arguments": {"query": "it"}}}]
    return message


@per_completion
async def answered(completion: Any) -> float:
    return float(len(str(completion)) % 7)


def answered_all(completions: Sequence[Any], **_: Any) -> list[float]:
    return [float(len(str(each)) % 7) for each in completions]


class Clock(TrainerCallback):
    """The seconds of each step. After `instant` of them the tool waits. Each step has the `expected` metrics. After
    each one, `write` gets the seconds and the log lines."""

    def __init__(
        self, instant: int, seconds: float, expected: dict[str, float],
        write: Callable[[list[float], list[dict[str, float]]], None],
    ) -> None:  # fmt: skip
        self.ends: list[float] = []
        self._instant, self._seconds, self._expected, self._write = instant, seconds, expected, write

    def on_log(self, _: Any, state: Any, *__: Any, logs: dict[str, float], **___: Any) -> None:
        if "loss" in logs:
            assert all(logs[name] == value for name, value in self._expected.items()), logs
            lines = [line for line in state.log_history if "loss" in line]
            self._write([end - begin for begin, end in itertools.pairwise(self.ends)], lines)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        global waiting_s
        self.ends.append(now())
        waiting_s = 0.0 if len(self.ends) < self._instant else self._seconds
        print(f"step {len(self.ends)} at {self.ends[-1] - self.ends[0]:.2f} s", flush=True)


def work(args: argparse.Namespace) -> None:
    """Measure an arm in this process."""
    where, on_gpu = device(), torch.cuda.is_available()
    ahead = 0 if args.worker == "stock" else int(args.worker.removeprefix("ours_"))
    before, counted = ahead + 2, args.steps * (ahead + 1)
    slow = 1 if args.worker == "stock" else before + counted + ahead  # nothing is generated in the last ones
    expected = {"dialogue/turns": TURNS, "outcome/ok": 1} if args.customer else {"tools/call_frequency": CALLS}

    def write(steps: list[float], lines: list[dict[str, float]]) -> None:
        first = before + counted if args.worker == "stock" else before + counted + before
        instant = steps[before - 1 : before + counted - 1]
        waited = steps[first - 1 : before + counted + slow - ahead - 1]
        lines = lines[first : before + counted + slow - ahead]  # of the same steps
        known = [name for name in lines[0] if name.startswith("time/")] if lines else []
        times = {
            name: statistics.mean(line[name] for line in lines)
            for name in known
            if None not in [line[name] for line in lines]
        }
        write_json(args.json, {
            "arm": args.worker, "instant_s": statistics.mean(instant) if instant else None,
            "slow_s": statistics.mean(waited) if waited else None, "instant": instant, "slow": waited,
            "all_s": steps, "times_s": times,
        })  # fmt: skip

    clock = Clock(before + counted, args.seconds, expected, write)
    tokenizer = packaged_tokenizer()
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    if not args.customer:
        chat_turns.parse_response = upstream.parse_response = parsed  # type: ignore[assignment]
    engine: dict[str, Any] = {"generation_kwargs": {"max_new_tokens": args.tokens, "min_new_tokens": args.tokens}}
    if on_gpu or args.customer:
        engine = {
            "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.35,
            "vllm_max_model_length": 2048, "gradient_checkpointing": True, "num_iterations": 1,
            "generation_kwargs": {"max_tokens": args.tokens, "ignore_eos": True},
        }  # fmt: skip
    behind = TURNS - 1 if args.customer else CALLS  # turns behind an answer
    settings = quiet(
        where, tempfile.mkdtemp(), per_device_train_batch_size=8, gradient_accumulation_steps=args.groups,
        num_generations=GROUP, max_completion_length=behind * (args.tokens + 100) + args.tokens,
        lr_scheduler_type="constant", shuffle_dataset=False, dataloader_pin_memory=False,
        max_steps=before + counted + slow, beta=0.0, **engine,
    )  # fmt: skip
    texts = [f"Is lesson {number} of the course for me? " * args.repeated for number in range(64)]
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype(where))
    shared: dict[str, Any] = {
        "train_dataset": Dataset.from_list(rows_of(texts)), "callbacks": [clock], "processing_class": tokenizer,
        "tools": None if args.customer else [search],
        "peft_config": LoraConfig(r=16, target_modules="all-linear") if on_gpu else None,
    }  # fmt: skip
    if args.worker == "stock":
        trainer: GRPOTrainer = GRPOTrainer(model, answered_all, args=GRPOConfig(**settings), **shared)
    else:
        own = SalesGRPOConfig(
            rollout_lookahead=ahead, held_out_eval=False, max_sampling_logp_difference=math.inf, **settings
        )
        trainer = SalesGRPOTrainer(
            model, [answered], args=own, partner=Customer() if args.customer else None, **shared
        )
    trainer.train()
    if args.worker != "stock":
        trainer.finish()


def tell(figures: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the row of an arm, and the calculated one beside `ours_0`."""
    instant_s, slow_s = figures["instant_s"], figures["slow_s"]
    cells = [
        "-" if mean is None else f"{mean:.2f} s ({len(steps)})"
        for mean, steps in ((instant_s, figures["instant"]), (slow_s, figures["slow"]))
    ]
    ratio = "-" if slow_s is None else f"{slow_s / instant_s:.3f}"
    print(f"| {figures['arm']} | {' | '.join(cells)} | {ratio} |", flush=True)
    if args.customer and figures["arm"] == "ours_0" and instant_s is not None:
        slow_s = instant_s + args.groups * GROUP * TURNS * args.seconds
        print(f"| stock, calculated | {instant_s:.2f} s | {slow_s:.2f} s | {slow_s / instant_s:.1f} |", flush=True)
    print({name: [round(each, 2) for each in figures[name]] for name in ("instant", "slow")}, flush=True)
    print(figures["times_s"], file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the arms one after the other, and print a table."""
    made = parser(__doc__)
    made.add_argument("--shape", default="7b" if torch.cuda.is_available() else "tiny")
    made.add_argument("--arms", nargs="+", choices=ARMS, help="default: ours_0 ours_2, and stock without a customer")
    made.add_argument("--customer", action="store_true", help="a partner in place of the tool")
    made.add_argument("--groups", type=int, default=8, help="of 8 conversations, in a step")
    made.add_argument("--seconds", type=float, help="of a call or a reply; default: 1, of a customer 2")
    made.add_argument("--tokens", type=int, default=64 if torch.cuda.is_available() else 8, help="of a turn")
    made.add_argument(
        "--repeated", type=int, default=20 if torch.cuda.is_available() else 1, help="a prompt's sentence"
    )
    made.add_argument("--model", type=Path, help="folder of weights made before, or where they are to be kept")
    made.add_argument("--steps", type=int, default=3, help="counted steps, times N + 1 with a lookahead of N")
    made.add_argument("--worker", help=argparse.SUPPRESS)
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = made.parse_args(argv)
    if args.customer and "stock" in (args.arms or ()):
        made.error("stock TRL has no partners: its step is calculated beside ours_0")
    args.seconds = (2.0 if args.customer else 1.0) if args.seconds is None else args.seconds
    if args.worker:
        work(args)
        return
    what = "reply of the customer" if args.customer else "call"
    print(f"{args.shape} on {device_name(device())}, {args.seconds:g} s a {what}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or Path(scratch) / "model"
        if not folder.is_dir():
            save_model(args.shape, folder, device())
        torch.cuda.empty_cache()
        print("| arm | instant | slow | slow / instant |\n|---|---|---|---|", flush=True)
        for arm in args.arms or (["ours_0", "ours_2"] if args.customer else ["ours_0", "ours_2", "stock"]):
            out = Path(scratch) / f"{arm}.json" if args.json is None else args.json.with_suffix(f".{arm}.json")
            words = [*(argv or sys.argv[1:]), "--worker", arm, "--folder", str(folder), "--json", str(out)]
            out.unlink(missing_ok=True)
            try:
                in_a_process("tools", words, out.with_suffix(".log"))
            finally:  # a bench that is stopped tells what there is, too
                if out.is_file():
                    tell(json.loads(out.read_text()), args)


if __name__ == "__main__":
    if "--worker" not in sys.argv:  # an arm ends as its trainer ends it
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    main()
