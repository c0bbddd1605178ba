#!/usr/bin/env python3
"""What slow rewards cost a step: stock TRL, rewards streamed (exact), and rollouts that are 1, 2 and 4 steps ahead.

    .venv/bin/python scripts/bench_pipeline.py [--shape 0.5b|7b|tiny] [--latency 5.6 3.2] [--json FILE]
    .venv/bin/python scripts/bench_pipeline.py --device cpu    # a tiny policy, within three minutes
    CUDA_VISIBLE_DEVICES=0 .venv/bin/python scripts/bench_pipeline.py --server 1    # vLLM's server on another GPU

Random weights of a real shape, 64 completions a step, 8 for each prompt, of lengths that depend on the prompt and the
number of the sample alone: every arm generates as much. A reward is two calls over HTTP to a service in a process of
its own, which answers after a time that depends on the same two: log-normal around the two figures of `--latency`,
which may be given several times. Every arm asks the same service through the same client with the same limits; this
package's do so from a process of their own on a GPU, as in training (`reward_process`).

- `stock` is TRL's own trainer with one async reward function that gathers all calls of the batch;
- `exact` is this package's trainer, `lookahead_N` the same with `rollout_lookahead: N`;
- `floor` is `exact` with a service that answers at once: what is left when no reward is waited for.

The arms share the policy, the reference, the optimizer and vLLM's engine, and take turns in one run: stock, exact,
floor, those with lookahead, whose differences are large, once, then floor, exact, stock. A step is timed from its
predecessor's end to its own, the device synchronised there. Steps in which rollouts pile up at first or run out at
last are left out. The prompts are those of `--steps` steps, which come again and again, so that every block that is
measured has each of them equally often. Steps that wait and steps that do not may take turns, so a lookahead of N is
measured over two rounds of N + 1 steps at least, and all figures are means. Beside the times stands the share of the
rewards' makespan that nobody waited for.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import trl.trainer.grpo_trainer as upstream
from bench_rewards import GENERATIONS, SlowReward, service, set_medians
from bench_server import fix_server_lengths, for_training, vllm_server
from bench_timing import SHAPES, Meter
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.demo.policy import build_tokenizer
from salesrl_trl.reward.batch import BatchedReward, RewardBatch
from salesrl_trl.reward.remote import RemoteReward
from salesrl_trl.rollout.pipeline import Pipeline
from salesrl_trl.telemetry.instruments import Instruments, InstrumentSettings
from salesrl_trl.timing import overlap
from salesrl_trl.trainer import SalesGRPOTrainer

SHAPES["tiny"] = {
    "vocab_size": 3072,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,  # heads of 32, vLLM's least on a CPU
}
TOKENS = {"0.5b": 256, "7b": 256, "tiny": 24}
"""Most tokens of a completion; a quarter of it is the least."""
MICRO_BATCHES = {"0.5b": (8, 8), "7b": (8, 8), "tiny": (8, 4)}
"""Completions of one, and how many an update has."""
PROMPT_WORDS = {"0.5b": 80, "7b": 80, "tiny": 20}
BETA = 0.04
MEASURED = 3
"""Steps of a block that count."""
LOOKAHEAD = {"exact": 0, "lookahead_1": 1, "lookahead_2": 2, "lookahead_4": 4, "floor": 0}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=sorted(TOKENS), help="0.5b, or tiny on a CPU, when not given")
    parser.add_argument(
        "--latency", nargs=2, type=float, action="append", metavar=("RAG_S", "JUDGE_S"),
        help="median seconds of the two calls; 5.6 3.2, or on a CPU 1.0 0.6, when not given",
    )  # fmt: skip
    parser.add_argument("--arms", nargs="+", choices=("stock", *LOOKAHEAD), default=("stock", *LOOKAHEAD))
    parser.add_argument(
        "--steps", type=int, default=MEASURED, help="steps of a block that count, each of other prompts"
    )
    parser.add_argument("--rounds", type=int, default=1, help="times that all arms take their turns")
    parser.add_argument(
        "--server", metavar="GPU", help="`vllm_mode: server`, on the GPU that `CUDA_VISIBLE_DEVICES` calls so"
    )
    parser.add_argument("--trace", type=Path, help="folder for the trace of the package's own arms")
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args(argv)
    on_cpu = args.device == "cpu"
    if args.server is not None and on_cpu:
        parser.error("--server needs two GPUs: weights are pushed into a server by NCCL")
    args.shape = args.shape or ("tiny" if on_cpu else "0.5b")
    args.latency = args.latency or [(1.0, 0.6) if on_cpu else (5.6, 3.2)]
    measure(args)


# What is the same for all arms


def completion_tokens(prompt: Sequence[int], sample: int, most: int) -> int:
    """Length of a prompt's completion: a quarter of the most at least, then ended with 3 / `most` at each token."""
    draw = random.Random(f"{list(prompt)} {sample}").expovariate(3 / most)
    return min(most // 4 + int(draw), most)


def window(ahead: int, steps: int) -> tuple[int, int, int]:
    """How many steps a block with a lookahead has before those that count, how many of those, and how many behind.
    Those that count are whole rounds of waiting, and of the prompts of `steps` steps."""
    if not ahead:
        return 1, steps, 0
    round_ = math.lcm(ahead + 1, steps)
    return ahead + 1, round_ * math.ceil(2 * (ahead + 1) / round_), ahead


def fix_lengths(engine: Any, most: int) -> None:
    """Let vLLM's `LLM` end completions at those lengths. Random weights would end none by themselves."""
    generate = engine.generate

    def fixed(prompts: Sequence[dict[str, Any]], sampling_params: Any, **kwargs: Any) -> Any:
        samples: Counter[tuple[int, ...]] = Counter()
        every = []
        for prompt in prompts:
            ids, own = tuple(prompt["prompt_token_ids"]), sampling_params.clone()
            own.max_tokens, own.ignore_eos = completion_tokens(ids, samples[ids], most), True
            samples[ids] += 1
            every.append(own)
        return generate(prompts, sampling_params=every, **kwargs)

    engine.generate = fixed


def hidden_share(batch: RewardBatch) -> float:
    """Of the time from a batch's first call to its last answer, what the trainer did not wait."""
    if batch.times.first is None or not batch.times.seconds:
        return math.nan
    made = (batch.times.first, batch.times.last)
    return 1.0 - sum(overlap(made, wait) for wait in batch.waits) / batch.times.seconds


# The trainers


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ends.clear()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


class Bench:
    """Two trainers, stock's and ours, that share everything heavy.

    Args:
        args (`argparse.Namespace`):
            The command line's.
        url (`str`):
            Of the service.
        scratch (`Path`):
            For the model.
        servers (`contextlib.ExitStack`):
            Ends the server that samples, where there is one.
    """

    def __init__(self, args: argparse.Namespace, url: str, scratch: Path, servers: contextlib.ExitStack) -> None:
        self._args = args
        self._url = url
        self._batches: list[RewardBatch] = []
        """Those that were waited for, oldest first."""
        path = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
        os.environ["PYTHONPATH"] = os.pathsep.join(each for each in path if each)  # where the child finds the reward
        self._rewards: dict[str, BatchedReward] = {
            "stock": self._seen(SlowReward(url)),
            "ours": self._seen(SlowReward(url) if args.device == "cpu" else RemoteReward(SlowReward(url))),  # type: ignore[arg-type]
        }
        self._clock = Clock()
        on_cpu = args.device == "cpu"
        dtype = torch.float32 if on_cpu else torch.bfloat16
        set_seed(0)
        with torch.device(args.device):
            model = Qwen2ForCausalLM._from_config(Qwen2Config(**SHAPES[args.shape]), dtype=dtype)
        model.save_pretrained(scratch / "model")
        build_tokenizer().save_pretrained(scratch / "model")
        del model
        self._server_url: str | None = None
        if args.server is not None:
            options = ("--dtype", "bfloat16", "--gpu-memory-utilization", "0.5", *for_training(1024))
            log = scratch / "server.log"
            server = vllm_server(scratch / "model", log, *options, CUDA_VISIBLE_DEVICES=args.server)
            self._server_url = servers.enter_context(server)
        self._model = Qwen2ForCausalLM.from_pretrained(scratch / "model", dtype=dtype)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, fused=not on_cpu)
        self._settings = self._common(on_cpu, str(scratch / "out"))
        ours = self._build_ours(args.trace)
        self.instruments = ours._instruments
        most = TOKENS[args.shape]
        if self._server_url is None:
            fix_lengths(ours.vllm_generation.llm, most)
        else:
            client = ours.vllm_generation.vllm_client
            fix_server_lengths(client, lambda prompt, sample: completion_tokens(prompt, sample, most))
        self._meter = Meter()
        self._meter.watch(self.instruments, "figures", "record_batch", "record_rewards", "step_ends")
        self._meter.watch(self.instruments.timeline, "_open", "_close")
        self._measured_s = self._inside_s = 0.0
        self.trainers: dict[str, GRPOTrainer] = {"stock": self._build_stock(ours), "ours": ours}

    def _seen(self, reward: BatchedReward) -> BatchedReward:
        """`reward`, whose batches are noted when they were waited for."""
        settled = reward._settled

        def noted() -> None:
            assert reward._latest is not None
            self._batches.append(reward._latest)
            settled()

        reward._settled = noted  # type: ignore[method-assign]
        return reward

    def _common(self, on_cpu: bool, output_dir: str) -> dict[str, Any]:
        shape, (micro_batch, micro_batches) = self._args.shape, MICRO_BATCHES[self._args.shape]
        return {
            "output_dir": output_dir,
            "use_cpu": on_cpu,
            "bf16": not on_cpu,
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": micro_batches,
            "num_generations": GENERATIONS,
            "max_completion_length": TOKENS[shape],
            "use_vllm": True,
            **(
                {"vllm_mode": "colocate"}
                if self._server_url is None
                else {
                    "vllm_mode": "server",
                    "vllm_server_base_url": self._server_url,
                    "generation_kwargs": {"seed": 0},  # the number of a sample
                }
            ),
            "vllm_gpu_memory_utilization": 0.25,
            "vllm_max_model_length": 1024 if not on_cpu else 512,
            "gradient_checkpointing": not on_cpu,
            "learning_rate": 1e-6,
            "lr_scheduler_type": "constant",
            "loss_type": "dapo",
            "shuffle_dataset": False,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
        }

    def _build_ours(self, trace: Path | None) -> SalesGRPOTrainer:
        steps = range(2**62) if trace else range(0)
        instruments = Instruments(
            InstrumentSettings(trace_steps=steps, heartbeat_s=0.0), torch.device(self._args.device, 0)
            if self._args.device == "cuda" else torch.device("cpu"), trace or Path(self._settings["output_dir"]),
        )  # fmt: skip
        config = SalesGRPOConfig(
            beta=BETA, held_out_eval=False, max_sampling_logp_difference=math.inf, **self._settings
        )
        return self._built(SalesGRPOTrainer, self._rewards["ours"], config, instruments=instruments)  # type: ignore[return-value]

    def _build_stock(self, ours: SalesGRPOTrainer) -> GRPOTrainer:
        """With the reference and the engine of `ours`."""
        build, upstream.VLLMGeneration = upstream.VLLMGeneration, lambda **_: ours.vllm_generation
        try:
            stock = self._built(GRPOTrainer, self._rewards["stock"], GRPOConfig(beta=0.0, **self._settings))
        finally:
            upstream.VLLMGeneration = build
        stock.beta, stock.ref_model = BETA, ours.ref_model
        return stock

    def _built(self, kind: type[GRPOTrainer], reward: BatchedReward, config: GRPOConfig, **more: Any) -> GRPOTrainer:
        micro_batch, micro_batches = MICRO_BATCHES[self._args.shape]
        words = ("price", "delivery", "refund", "价格", "发货", "退款", "warranty", "保修", "尺寸", "discount")
        draw = random.Random(0)
        rows = [
            {
                "prompt": [
                    {"role": "user", "content": " ".join(draw.choices(words, k=PROMPT_WORDS[self._args.shape]))}
                ],
                "row": index,
            }
            for index in range(self._args.steps * micro_batch * micro_batches // GENERATIONS)
        ]
        trainer = kind(
            self._model, reward, args=config, train_dataset=Dataset.from_list(rows), callbacks=[self._clock],
            processing_class=build_tokenizer(), optimizers=(self._optimizer, None), **more,
        )  # fmt: skip
        return trainer

    def close(self) -> None:
        """Connections and instruments."""
        self.instruments.close()
        for name, trainer in self.trainers.items():
            asyncio.run_coroutine_threadsafe(self._rewards[name].aclose(), trainer.async_loop).result()  # type: ignore[attr-defined]

    def instruments_share(self) -> float | None:
        """Share of the floor's time that the host spent in the instruments."""
        return self._inside_s / self._measured_s if self._measured_s else None

    def block(self, arm: str, latency: Sequence[float], steps: int) -> dict[str, list[float]]:
        """Some steps of an arm: seconds of each that counts, shares of reward time hidden, and failures."""
        ahead = LOOKAHEAD.get(arm, 0)
        before, steps, after = window(ahead, steps)
        trainer = self.trainers["stock" if arm == "stock" else "ours"]
        set_medians(self._url, (0.0, 0.0) if arm == "floor" else latency)
        self._batches.clear()
        if arm != "stock":
            trainer._pipeline = Pipeline(trainer, ahead, references_ahead=True)
        trainer.args.max_steps = before + steps + after
        inside, started = self._meter.seconds, time.perf_counter()
        trainer.train()
        if arm == "floor":
            self._measured_s += time.perf_counter() - started
            self._inside_s += self._meter.seconds - inside
        seconds = [end - start for start, end in zip(self._clock.ends, self._clock.ends[1:], strict=False)]
        rewards = [reward for batch in self._batches for reward in batch.rewards]
        return {
            "step_s": seconds[before - 1 : before - 1 + steps],
            "hidden": [hidden_share(batch) for batch in self._batches[before : before + steps]],
            "failures": [sum(reward is None or reward.value is None for reward in rewards)],
            "lengths": [
                entry["completions/mean_length"]
                for entry in trainer.state.log_history[before : before + steps]
                if "completions/mean_length" in entry
            ],
        }


def measure(args: argparse.Namespace) -> None:
    """All arms' figures, told and written after each latency."""
    arms = [arm for arm in ("stock", *LOOKAHEAD) if arm in args.arms]
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, service() as url, contextlib.ExitStack() as servers:
        bench = Bench(args, url, Path(scratch), servers)
        for arm in {"stock" if arm == "stock" else "exact" for arm in arms}:
            bench.block(arm, (0.0, 0.0), 1)  # to warm up: kernels, pools, connections
        for latency in args.latency:
            figures.append(_measure_one(bench, arms, latency, args))
            print(table(figures[-1]), flush=True)
            if args.json:
                first, *others = figures
                told = {**first, "others": others} if others else first
                args.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        bench.close()


def _measure_one(
    bench: Bench, arms: Sequence[str], latency: Sequence[float], args: argparse.Namespace
) -> dict[str, Any]:
    """All arms' figures with one latency."""
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
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "latency_s": list(latency),
        "arms": figures,
        "floor_s": None if floor is None else floor["step_s_mean"],
        "floor": floor,
        "instruments_share": bench.instruments_share(),
    }


def table(figures: dict[str, Any]) -> str:
    """For people."""
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # with the processes that it has started
    main()
