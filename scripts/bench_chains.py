#!/usr/bin/env python3
"""What reward chains in flight cost vLLM, which generates in the same process: speed with them over speed without.

    .venv/bin/python scripts/bench_chains.py [--chains 256] [--rounds 6] [--shape 0.5b|tiny] [--json FILE]

Both are Python code under one lock. Real chains (parse, both RAG endpoints, judge, score, caches) run on an event
loop in a thread of its own, as in training; so many are in flight all the time, each ended one followed by the next,
against a service in a process of its own that takes about 5.6 s and 3.2 s. Meanwhile the main thread generates
completions of fixed length. Blocks take turns (without, with, without); the figure is the median over rounds of the
ratio of their speeds.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, as TRL has it

import torch
from bench_pipeline import SHAPES, service
from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed

from salesrl_trl.assembly import build_reward, prepare_reward
from salesrl_trl.config import DEFAULT_BRANCHES, RewardConfig
from salesrl_trl.data.sources import load_rows
from salesrl_trl.reward.chain import SalesReward

PROMPTS = {"0.5b": 64, "tiny": 16}
TOKENS = {"0.5b": 256, "tiny": 96}


class Chains:
    """So many chains in flight, on a loop of their own.

    Args:
        reward (`SalesReward`):
            Scores.
        rows (`int`):
            There are.
    """

    def __init__(self, reward: SalesReward, rows: int) -> None:
        self.ended = 0
        self.failed = 0
        self._reward = reward
        self._rows = rows
        self._number = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, count: int) -> None:
        """Put so many in flight."""
        self._call(lambda: self._tasks.extend(self._loop.create_task(self._one_after_another()) for _ in range(count)))

    def stop(self) -> None:
        """Cancel them."""
        self._call(lambda: [task.cancel() for task in self._tasks])
        self._tasks.clear()

    def _call(self, function: Callable[[], Any]) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (function(), done.set()))
        done.wait()

    async def _one_after_another(self) -> None:
        while True:
            self._number += 1
            number = self._number
            fields = {"user_profile": "A nurse with evenings free", "rewritten_query": f"price of course {number}",
                      "history_summary": "Asked for the price, then for the dates. " * 3}  # fmt: skip
            batch = self._reward.begin([number % self._rows])
            try:
                batch.start(0, json.dumps(fields))
                await batch.settled([[0]])
            finally:
                self._reward.forget(batch)
            self.ended += 1
            self.failed += batch.rewards[0] is None or batch.rewards[0].value is None


def measure(shape: str, chains: int, rounds: int) -> dict[str, Any]:
    """Tokens a second with and without."""
    from vllm import LLM, SamplingParams

    on_gpu = torch.cuda.is_available()
    set_seed(0)
    rows = load_rows("demo", "train", list(DEFAULT_BRANCHES), None)
    config = RewardConfig(
        rag_max_concurrency=1024, judge_max_concurrency=1024, initial_concurrency=1024, hedge_fraction=0.0
    )
    with tempfile.TemporaryDirectory() as scratch, service() as url:
        model = Qwen2ForCausalLM._from_config(Qwen2Config(**SHAPES[shape]))
        model.to(torch.bfloat16 if on_gpu else torch.float32).save_pretrained(f"{scratch}/model")
        del model
        llm = LLM(
            f"{scratch}/model", skip_tokenizer_init=True, gpu_memory_utilization=0.4, max_model_len=1024,
            enforce_eager=not on_gpu, logprobs_mode="processed_logprobs",
        )  # fmt: skip
        prompts: Any = [{"prompt_token_ids": [100 + i, *range(200, 456)]} for i in range(PROMPTS[shape])]
        settings = SamplingParams(
            temperature=1.0, max_tokens=TOKENS[shape], ignore_eos=True, detokenize=False, logprobs=0
        )

        def speed() -> float:
            started = time.perf_counter()
            llm.generate(prompts, settings, use_tqdm=False)
            return PROMPTS[shape] * TOKENS[shape] / (time.perf_counter() - started)

        reward = build_reward(
            config, prepare_reward(config, list(DEFAULT_BRANCHES)), rows, url, f"{url}/v1", output_dir=Path(scratch)
        )
        running = Chains(reward, len(rows))
        speed()
        speeds: dict[str, list[float]] = {"with": [], "without": []}
        ratios, busy, ended = [], 0.0, 0
        for _ in range(rounds):
            alone = [speed()]
            running.start(chains)
            time.sleep(3.0)  # the burst at the start is over, and the first answers are near
            before, started = running.ended, time.perf_counter()
            beside = []
            while time.perf_counter() - started < 8.0 or len(beside) < 2:
                beside.append(speed())
            busy += time.perf_counter() - started
            ended += running.ended - before
            running.stop()
            time.sleep(0.5)
            alone.append(speed())
            speeds["with"] += beside
            speeds["without"] += alone
            ratios.append(statistics.mean(beside) / statistics.mean(alone))
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "shape": shape,
        "chains": chains,
        "chains_per_s": ended / busy,
        "failed": running.failed,
        "traffic": {name: dict(each) for name, each in reward.take_report().traffic.items()},
        "tokens_per_s": {name: statistics.median(each) for name, each in speeds.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(PROMPTS), default="0.5b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--chains", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args(argv)
    figures = measure(args.shape, args.chains, args.rounds)
    speeds, ratios = figures["tokens_per_s"], figures["ratios"]
    print(
        f"{figures['device']}, {figures['shape']}: {figures['chains']} chains in flight, "
        f"{figures['chains_per_s']:.1f} ended a second, {figures['failed']} failed; {speeds['without']:.0f} tokens/s "
        f"without, {speeds['with']:.0f} with them, ratio {figures['ratio']:.3f} ({min(ratios):.3f} to "
        f"{max(ratios):.3f})"
    )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
