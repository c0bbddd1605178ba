"""The cost of slow rewards in a step: stock TRL, streamed rewards, and rollouts that are 1, 2 and 4 steps ahead.

    .venv/bin/python -m benchmarks.pipeline [--shape 0.5b|7b|tiny] [--latency 5.6 3.2] [--json FILE]
    .venv/bin/python -m benchmarks.pipeline --device cpu    # a tiny policy, within three minutes
    CUDA_VISIBLE_DEVICES=0 .venv/bin/python -m benchmarks.pipeline --server 1    # vLLM's server on another GPU

The arms:

- `stock` is TRL's own trainer, with one async reward function that gathers all calls of the batch;
- `exact` is this package's trainer, which scores each completion when it ends;
- `lookahead_N` is the same with `rollout_lookahead: N`;
- `floor` is `exact` with a service that answers at once: the time that is left when nobody waits for a reward.

The same for every arm:

- random weights of a real shape; one policy, reference, optimizer and vLLM engine for all arms;
- 64 completions a step, 8 for each prompt (16 with the tiny policy); their lengths depend on the prompt and the number
  of the sample alone (`benchmarks.lengths`);
- a reward is two HTTP calls to a service in a process of its own; the time of an answer depends on the same two:
  log-normal around the two figures of `--latency`, which may be given several times;
- one client with the same limits; on a GPU this package's arms use it from a process of their own, as in training
  (`reward_process`).

The order and the count:

- The arms take turns in one run: stock, exact and floor, then each lookahead once, then floor, exact, stock. The
  differences of a lookahead are large, so once is enough.
- A step lasts from its predecessor's end to its own, with the device synchronised there.
- Steps in which rollouts pile up at first, or run out at last, are not counted.
- The prompts are those of `--steps` steps and repeat. Every measured block has each of them equally often.
- With a lookahead of N, steps that wait and steps that do not may take turns. So it is measured over at least two
  rounds of N + 1 steps, and all figures are means.
- `hidden` is the share of the rewards' makespan in which nobody waited for them.
"""

import argparse
import asyncio
import contextlib
import itertools
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import trl.trainer.grpo_trainer as upstream
from datasets import Dataset
from transformers import Qwen2ForCausalLM, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from benchmarks.common import BETA, device_name, dtype, now, parser, quiet, rows_of, save_model, write_json
from benchmarks.lengths import fix_lengths, fix_server_lengths
from benchmarks.service import GENERATIONS, SlowReward, service, set_medians
from benchmarks.timing import Meter
from benchmarks.vllm_server import for_training, vllm_server
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.demo.policy import packaged_tokenizer
from salesrl_trl.reward.base import BatchedReward
from salesrl_trl.reward.batch import BatchResult, RewardBatch
from salesrl_trl.reward.remote import RemoteReward
from salesrl_trl.telemetry.instruments import Instruments, InstrumentSettings
from salesrl_trl.timing import overlap
from salesrl_trl.trainer import SalesGRPOTrainer

TOKENS = {"0.5b": 256, "7b": 256, "tiny": 24}
"""Longest completion. The shortest is a quarter of it."""
MICRO_BATCHES = {"0.5b": (8, 8), "7b": (8, 8), "tiny": (8, 2)}
"""Completions of a micro-batch, and micro-batches of an update."""
PROMPT_WORDS = {"0.5b": 80, "7b": 80, "tiny": 20}
WORDS = ("price", "delivery", "refund", "价格", "发货", "退款", "warranty", "保修", "尺寸", "discount")
MEASURED = 3
"""Counted steps of a block."""
LOOKAHEAD = {"exact": 0, "lookahead_1": 1, "lookahead_2": 2, "lookahead_4": 4, "floor": 0}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--shape", choices=sorted(TOKENS), help="default: 0.5b; tiny on a CPU")
    made.add_argument(
        "--latency", nargs=2, type=float, action="append", metavar=("RAG_S", "JUDGE_S"),
        help="median seconds of the two calls; default: 5.6 3.2; 1.0 0.6 on a CPU",
    )  # fmt: skip
    made.add_argument("--arms", nargs="+", choices=("stock", *LOOKAHEAD), default=("stock", *LOOKAHEAD))
    made.add_argument("--steps", type=int, default=MEASURED, help="counted steps of a block, each with other prompts")
    made.add_argument("--rounds", type=int, default=1, help="how often all arms take their turns")
    made.add_argument(
        "--server", metavar="GPU", help="`vllm_mode: server`, on the GPU of this name in `CUDA_VISIBLE_DEVICES`"
    )
    made.add_argument("--trace", type=Path, help="folder for the trace of this package's arms")
    args = made.parse_args(argv)
    on_cpu = args.device == "cpu"
    if args.server is not None and on_cpu:
        made.error("--server needs two GPUs: weights are pushed into a server by NCCL")
    args.shape = args.shape or ("tiny" if on_cpu else "0.5b")
    args.latency = args.latency or [(1.0, 0.6) if on_cpu else (5.6, 3.2)]
    measure(args)


def window(ahead: int, steps: int) -> tuple[int, int, int]:
    """Steps of a block with a lookahead of `ahead`: those before the counted ones, the counted ones, those behind.

    The counted ones are whole rounds of waiting, and whole rounds of the prompts of `steps` steps.
    """
    if not ahead:
        return 1, steps, 0
    round_ = math.lcm(ahead + 1, steps)
    return ahead + 1, round_ * math.ceil(2 * (ahead + 1) / round_), ahead


def hidden_share(batch: RewardBatch) -> float:
    """The share of a batch's time, from its first call to its last answer, in which the trainer did not wait."""
    if batch.times.first is None or not batch.times.seconds:
        return math.nan
    made = (batch.times.first, batch.times.last)
    return 1.0 - sum(overlap(made, wait) for wait in batch.waits) / batch.times.seconds


class Clock(TrainerCallback):
    """The end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ends.clear()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(now())


class Bench:
    """Two trainers, TRL's and this package's, that share all large parts.

    Args:
        args (`argparse.Namespace`):
            The command line.
        url (`str`):
            Address of the service.
        scratch (`Path`):
            Folder for the model.
        servers (`contextlib.ExitStack`):
            Ends the server that samples, if there is one.
    """

    def __init__(self, args: argparse.Namespace, url: str, scratch: Path, servers: contextlib.ExitStack) -> None:
        self._args = args
        self._url = url
        self._batches: list[RewardBatch] = []
        """Batches that were waited for, oldest first."""
        self._device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
        on_cpu, most = args.device == "cpu", TOKENS[args.shape]
        self._rewards: dict[str, BatchedReward] = {
            "stock": self._noting(SlowReward(url)),
            "ours": self._noting(SlowReward(url) if on_cpu else RemoteReward(SlowReward(url))),
        }
        self._clock = Clock()
        set_seed(0)
        folder = save_model(args.shape, scratch / "model", self._device)
        engine: dict[str, Any] = {"vllm_mode": "colocate"}
        if args.server is not None:
            options = ("--dtype", "bfloat16", "--gpu-memory-utilization", "0.5", *for_training(1024))
            server = vllm_server(folder, scratch / "server.log", *options, CUDA_VISIBLE_DEVICES=args.server)
            engine = {
                "vllm_mode": "server",
                "vllm_server_base_url": servers.enter_context(server),
                "generation_kwargs": {"seed": 0},  # the number of a sample
            }
        self._model = Qwen2ForCausalLM.from_pretrained(folder, dtype=dtype(self._device))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, fused=not on_cpu)
        micro_batch, micro_batches = MICRO_BATCHES[args.shape]
        self._settings = quiet(
            self._device,
            str(scratch / "out"),
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=micro_batches,
            max_completion_length=most,
            use_vllm=True,
            vllm_gpu_memory_utilization=0.25,
            vllm_max_model_length=512 if on_cpu else 1024,
            gradient_checkpointing=not on_cpu,
            lr_scheduler_type="constant",
            loss_type="dapo",
            shuffle_dataset=False,
            dataloader_pin_memory=False,
            **engine,
        )
        self._instruments = Instruments(
            InstrumentSettings(trace_steps=range(2**62 if args.trace else 0), heartbeat_s=0.0), self._device,
            args.trace or scratch / "out",
        )  # fmt: skip
        config = SalesGRPOConfig(
            beta=BETA, held_out_eval=False, max_sampling_logp_difference=math.inf, **self._settings
        )
        ours = self._built(SalesGRPOTrainer, self._rewards["ours"], config, instruments=self._instruments)
        if args.server is None:
            fix_lengths(ours.vllm_generation.llm, most)
        else:
            fix_server_lengths(ours.vllm_generation.vllm_client, most)
        self._meter = Meter()
        self._meter.watch_instruments(self._instruments)
        self._measured_s = self._inside_s = 0.0
        self._trainers = {"stock": self._build_stock(ours), "ours": ours}

    def _noting(self, reward: BatchedReward) -> BatchedReward:
        """`reward`, which adds each batch to `_batches` when it was waited for."""
        result = reward.result

        async def noted(batch: RewardBatch, completions: Sequence[Any]) -> BatchResult:
            scored = await result(batch, completions)
            self._batches.append(batch)
            return scored

        reward.result = noted  # type: ignore[method-assign]
        return reward

    def _build_stock(self, ours: GRPOTrainer) -> GRPOTrainer:
        """TRL's trainer, with the reference and the engine of `ours`."""
        build, upstream.VLLMGeneration = upstream.VLLMGeneration, lambda **_: ours.vllm_generation
        try:
            stock = self._built(GRPOTrainer, self._rewards["stock"], GRPOConfig(beta=0.0, **self._settings))
        finally:
            upstream.VLLMGeneration = build
        stock.beta, stock.ref_model = BETA, ours.ref_model
        return stock

    def _built(self, kind: type[GRPOTrainer], reward: BatchedReward, config: GRPOConfig, **more: Any) -> GRPOTrainer:
        micro_batch, micro_batches = MICRO_BATCHES[self._args.shape]
        draw, words = random.Random(0), PROMPT_WORDS[self._args.shape]
        prompts = range(self._args.steps * micro_batch * micro_batches // GENERATIONS)
        rows = rows_of([" ".join(draw.choices(WORDS, k=words)) for _ in prompts])
        return kind(
            self._model, reward, args=config, train_dataset=Dataset.from_list(rows), callbacks=[self._clock],
            processing_class=packaged_tokenizer(), optimizers=(self._optimizer, None), **more,
        )  # fmt: skip

    def close(self) -> None:
        """Close connections and instruments."""
        self._instruments.close()
        for name, trainer in self._trainers.items():
            if isinstance(trainer, SalesGRPOTrainer):
                trainer.finish()
            else:
                asyncio.run_coroutine_threadsafe(self._rewards[name].aclose(), trainer.async_loop).result()  # type: ignore[attr-defined]

    def instruments_share(self) -> float | None:
        """The share of the floor's time that the host spent in the instruments."""
        return self._inside_s / self._measured_s if self._measured_s else None

    def block(self, arm: str, latency: Sequence[float], steps: int) -> dict[str, list[float]]:
        """Some steps of an arm: seconds and lengths of the counted ones, shares of reward time hidden, failures."""
        ahead = LOOKAHEAD.get(arm, 0)
        before, steps, after = window(ahead, steps)
        counted = slice(before, before + steps)
        trainer = self._trainers["stock" if arm == "stock" else "ours"]
        set_medians(self._url, (0.0, 0.0) if arm == "floor" else latency)
        self._batches.clear()
        if arm != "stock":
            trainer.rooms.pipeline.set_lookahead(ahead)
        trainer.args.max_steps = before + steps + after
        inside, started = self._meter.seconds, time.perf_counter()
        trainer.train()
        if arm == "floor":
            self._measured_s += time.perf_counter() - started
            self._inside_s += self._meter.seconds - inside
        seconds = [math.nan, *(end - start for start, end in itertools.pairwise(self._clock.ends))]
        rewards = [reward for batch in self._batches for reward in batch.rewards]
        lengths = [entry.get("completions/mean_length") for entry in trainer.state.log_history]
        return {
            "step_s": seconds[counted],
            "hidden": [hidden_share(batch) for batch in self._batches[counted]],
            "failures": [sum(reward is None or reward.value is None for reward in rewards)],
            "lengths": [length for length in lengths[counted] if length is not None],
        }


def measure(args: argparse.Namespace) -> None:
    """The figures of all arms, printed and written after each latency."""
    arms = [arm for arm in ("stock", *LOOKAHEAD) if arm in args.arms]
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, service() as url, contextlib.ExitStack() as servers:
        bench = Bench(args, url, Path(scratch), servers)
        for arm in {"stock" if arm == "stock" else "exact" for arm in arms}:
            bench.block(arm, (0.0, 0.0), 1)  # to warm up: kernels, pools, connections
        for latency in args.latency:
            figures.append(_measure_one(bench, arms, latency, args))
            print(table(figures[-1]), flush=True)
            first, *others = figures
            write_json(args.json, {**first, "others": others} if others else first)
        bench.close()


def _measure_one(
    bench: Bench, arms: Sequence[str], latency: Sequence[float], args: argparse.Namespace
) -> dict[str, Any]:
    """The figures of all arms with one latency."""
    blocks: dict[str, list[dict[str, list[float]]]] = {arm: [] for arm in arms}
    twice = [arm for arm in arms if not LOOKAHEAD.get(arm)]
    round_ = [*twice, *(arm for arm in arms if arm not in twice), *reversed(twice)]
    for arm in round_ * args.rounds:
        blocks[arm].append(bench.block(arm, latency, args.steps))
        latest = blocks[arm][-1]
        print(f"{arm}: {', '.join(f'{each:.2f}' for each in latest['step_s'])} s", flush=True)
    found = {
        arm: {name: [value for block in of_arm for value in block[name]] for name in of_arm[0]}
        for arm, of_arm in blocks.items()
    }
    stock = statistics.mean(found["stock"]["step_s"]) if "stock" in found else math.nan
    figures = {
        arm: {
            "step_s_median": statistics.median(each["step_s"]),
            "step_s_mean": statistics.mean(each["step_s"]),
            "ratio": statistics.mean(each["step_s"]) / stock,
            "hidden": statistics.mean(each["hidden"]),
            "reward_failures": sum(each["failures"]),
            "completion_tokens": statistics.mean(each["lengths"]),
            "step_s": each["step_s"],
        }
        for arm, each in found.items()
    }
    floor = figures.pop("floor", None)
    return {
        "shape": args.shape,
        "vllm": "colocate" if args.server is None else "server",
        "device": device_name(torch.device(args.device)),
        "latency_s": list(latency),
        "arms": figures,
        "floor_s": None if floor is None else floor["step_s_mean"],
        "floor": floor,
        "instruments_share": bench.instruments_share(),
    }


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    rag_s, judge_s = figures["latency_s"]
    lines = [
        f"{figures['device']}, {figures['shape']}, rewards of {rag_s:g} s + {judge_s:g} s",
        f"{'arm':14}{'step, s':>10}{'mean, s':>10}{'of stock':>10}{'hidden':>10}{'failures':>10}{'tokens':>8}",
    ]
    for arm, each in figures["arms"].items():
        lines.append(
            f"{arm:14}{each['step_s_median']:10.2f}{each['step_s_mean']:10.2f}{each['ratio']:10.3f}"
            f"{each['hidden']:10.0%}{each['reward_failures']:10d}{each['completion_tokens']:8.0f}"
        )
    if figures["floor_s"] is not None:
        share = figures["instruments_share"]
        lines.append(f"{'floor':14}{figures['floor_s']:10.2f}, of it in the instruments {share:.2%}")
    return "\n".join(lines)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # ends its child processes too
    main()
