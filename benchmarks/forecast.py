"""`salesrl forecast` beside what is then measured, and a lookahead that finds itself, with three services.

    .venv/bin/python -m benchmarks.forecast [--shape 0.5b|tiny] [--median 9] [--sigma 0.35] [--out FOLDER]

- `ahead_N` is a run with `rollout_lookahead: N`, `slots_N` one with 1 and at most N rewards at once. `salesrl
  forecast` reads the trace of `--base` and says what steps of the others will take, before they are run.
- `auto_instant`, `auto_slow` and `auto_changing` have `max_rollout_lookahead: 8`: rewards that answer at once, rewards
  of `--median` seconds, and rewards whose time is a quarter of it until half of the steps are done.

Random weights; 64 completions a step in groups of 8, all of one length; a reward waits a log-normal time that depends
on the completion alone. A step lasts from the end of the one before to its own. Every arm is a process of its own.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback

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
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.demo.packaged import packaged_tokenizer
from salesrl_trl.reward.functions import per_completion
from salesrl_trl.trainer import SalesGRPOTrainer

GROUP, COMPLETIONS, MOST = 8, 64, 8
factor = 1.0
"""Of a reward's seconds, at the moment."""


class Clock(TrainerCallback):
    """The end of each step. With a change, rewards are slow only from half of the steps on."""

    def __init__(self, changing: bool) -> None:
        self.ends: list[float] = []
        self._changing = changing

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        global factor
        self.ends.append(now())
        if self._changing:
            factor = 0.25 if state.global_step < state.max_steps / 2 else 1.0
        print(f"step {len(self.ends)} at {self.ends[-1] - self.ends[0]:.2f} s", flush=True)


def _ahead(arm: str) -> int:
    kind, _, number = arm.partition("_")
    return {"ahead": int(number), "slots": 1}[kind]


def work(args: argparse.Namespace) -> None:
    """Train an arm in this process."""
    global factor
    kind, _, which = args.worker.partition("_")
    ahead: dict[str, Any] = (
        {"max_rollout_lookahead": MOST} if kind == "auto" else {"rollout_lookahead": _ahead(args.worker)}
    )
    slots = asyncio.Semaphore(int(which) if kind == "slots" else COMPLETIONS * MOST)
    factor = {"instant": 0.0, "changing": 0.25}.get(which, 1.0)
    where, on_gpu = device(), torch.cuda.is_available()

    @per_completion
    async def slow(completion_ids: Sequence[int]) -> float:
        draw = random.Random(f"{list(completion_ids)}")
        async with slots:
            await asyncio.sleep(factor * args.median * draw.lognormvariate(0.0, args.sigma))
        return float(len(set(completion_ids)))

    engine: dict[str, Any] = {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": 1024,
        "generation_kwargs": {"max_tokens": args.tokens, "ignore_eos": True},
    } if on_gpu else {"generation_kwargs": {"max_new_tokens": args.tokens, "min_new_tokens": args.tokens}}  # fmt: skip
    settings = quiet(
        where, str(args.out / args.worker), per_device_train_batch_size=16, gradient_accumulation_steps=4,
        num_generations=GROUP, max_completion_length=args.tokens, lr_scheduler_type="constant",
        dataloader_pin_memory=False, max_steps=args.auto_steps if kind == "auto" else args.steps, beta=0.0,
        logging_steps=1, **engine,
    )  # fmt: skip
    own = SalesGRPOConfig(max_sampling_logp_difference=float("inf"), held_out_eval=False, **ahead, **settings)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype(where))
    clock = Clock(which == "changing")
    trainer = SalesGRPOTrainer(
        model, [slow], args=own, callbacks=[clock], processing_class=packaged_tokenizer(),
        train_dataset=Dataset.from_list(rows_of([f"Is lesson {number} for me? " for number in range(512)])),
    )  # fmt: skip
    trainer.train()
    seconds = [end - begin for begin, end in itertools.pairwise(clock.ends)]
    write_json(args.out / f"{args.worker}.json", {"arm": args.worker, "seconds": seconds})
    trainer.finish()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the base, forecast the others, run them."""
    on_gpu = torch.cuda.is_available()
    made = parser(__doc__)
    made.add_argument("--shape", default="0.5b" if on_gpu else "tiny")
    made.add_argument("--arms", nargs="+", default=["ahead_0", "ahead_2", "ahead_5", "slots_24"])
    made.add_argument("--autos", nargs="*", default=["auto_instant", "auto_slow", "auto_changing"])
    made.add_argument("--base", default="ahead_1")
    made.add_argument("--median", type=float, default=9.0 if on_gpu else 3.0, help="seconds of a reward")
    made.add_argument("--sigma", type=float, default=0.35)
    made.add_argument("--tokens", type=int, default=128 if on_gpu else 8)
    made.add_argument("--steps", type=int, default=16)
    made.add_argument("--auto_steps", type=int, default=60)
    made.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "forecast")
    made.add_argument("--worker", help=argparse.SUPPRESS)
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = made.parse_args(argv)
    if args.worker:
        work(args)
        return
    least = 2 * max(map(_ahead, [args.base, *args.arms])) + 3
    if args.steps < least:
        made.error(f"--steps is {args.steps}. Expected {least} or more: with a `rollout_lookahead` of N the first "
                   "N + 2 steps and the last N are not counted")  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"{args.shape} on {device_name(device())}, rewards of {args.median:g} s, sigma {args.sigma:g}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_model(args.shape, Path(scratch) / "model", device())
        torch.cuda.empty_cache()
        for arm in [args.base, *args.arms, *args.autos]:
            words = [*(sys.argv[1:] if argv is None else argv), "--worker", arm, "--folder", str(folder)]
            if not in_a_process("forecast", [*words, "--out", str(args.out)], args.out / f"{arm}.log"):
                continue
            result = json.loads((args.out / f"{arm}.json").read_text())
            if not arm.startswith("auto"):
                counted = result["seconds"][_ahead(arm) + 1 : len(result["seconds"]) - _ahead(arm)]
                print(f"{arm}: {statistics.mean(counted):.2f} s a step over {len(counted)}", flush=True)
            else:
                lines = (args.out / f"{arm}.log").read_text().splitlines()
                print(f"{arm}:", *(line for line in lines if "[Lookahead]" in line), sep="\n", flush=True)
            if arm == args.base:
                for other in args.arms:
                    words = ["--lookahead", str(_ahead(other))]
                    words += ["--slots", other.removeprefix("slots_")] if other.startswith("slots") else []
                    module = [sys.executable, "-m", "salesrl_trl.forecast", str(args.out / arm), *words]
                    subprocess.run(module, check=False)


if __name__ == "__main__":
    main()
