#!/usr/bin/env python3
"""What reward chains in flight cost vLLM's generation: its speed with them over its speed without.

    .venv/bin/python scripts/bench_chains.py [--chains 256] [--rounds 2] [--shape 0.5b|tiny] [--json FILE]

Chains are Python code and so is vLLM's engine. Real chains (parse, both RAG endpoints, judge, score, caches) run on an
event loop in a thread of its own, as in training: `inside` in this very process, `beside` in a child
(`reward_process`). So many are in flight all the time, each ended one followed by the next, against a service in
another process that takes about 5.6 s and 3.2 s. Meanwhile the main thread generates completions of fixed length.
Each block with chains stands between two without, and begins when the first chains have ended; the next block begins
when the calls in flight are over.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, as TRL has it

import torch
from bench_pipeline import SHAPES
from bench_rewards import service
from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed

from salesrl_trl.config import DEFAULT_BRANCHES, RewardConfig
from salesrl_trl.data.sources import load_rows
from salesrl_trl.reward.chain import SalesReward
from salesrl_trl.reward.remote import RemoteReward
from salesrl_trl.run.assembly import build_reward
from salesrl_trl.run.checks.reward import prepare_reward

PROMPTS = {"0.5b": 64, "tiny": 16}
TOKENS = {"0.5b": 256, "tiny": 96}
BLOCK = 6
"""Batches that are generated with chains in flight."""


class Chains:
    """So many chains in flight, on a loop of their own.

    Args:
        reward (`SalesReward` or `RemoteReward`):
            Scores.
        rows (`int`):
            There are.
    """

    def __init__(self, reward: SalesReward | RemoteReward, rows: int) -> None:
        self.ended = 0
        self.failed = 0
        self.in_flight = 0
        self._reward = reward
        self._rows = rows
        self._number = 0
        self._running = False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def start(self, count: int) -> None:
        """Put so many in flight, and wait until as many have ended: they are spread over time by then."""
        self._running, before = True, self.ended
        for _ in range(count):
            asyncio.run_coroutine_threadsafe(self._one_after_another(), self._loop)
        while self.ended < before + count:
            time.sleep(0.1)

    def stop(self) -> None:
        """Let those in flight end, and start no more."""
        self._running = False
        while self.in_flight:
            time.sleep(0.1)

    def close(self) -> None:
        """Connections, and the child."""
        asyncio.run_coroutine_threadsafe(self._reward.aclose(), self._loop).result()

    async def _one_after_another(self) -> None:
        self.in_flight += 1
        while self._running:
            self._number += 1
            number = self._number
            fields = {"user_profile": "A nurse with evenings free", "rewritten_query": f"price of course {number}",
                      "history_summary": "Asked for the price, then for the dates. " * 3}  # fmt: skip
            batch = self._reward.begin([number % self._rows])
            batch.start(0, json.dumps(fields))
            await batch.settled([[0]])
            self._reward.forget(batch)
            self.ended += 1
            self.failed += batch.rewards[0] is None or batch.rewards[0].value is None
        self.in_flight -= 1


def measure(shape: str, chains: int, rounds: int) -> dict[str, Any]:
    """Tokens a second with and without, by where the chains run."""
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

        def chain() -> SalesReward:
            parts = prepare_reward(config, list(DEFAULT_BRANCHES))
            return build_reward(config, parts, rows, url, f"{url}/v1", output_dir=Path(tempfile.mkdtemp(dir=scratch)))

        arms = {"inside": Chains(chain(), len(rows)), "beside": Chains(RemoteReward(chain()), len(rows))}
        found: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
        speed()
        for number in range(rounds):
            for arm in arms if number % 2 == 0 else reversed(arms):
                alone = [speed() for _ in range(BLOCK // 2)]
                arms[arm].start(chains)
                before, started = arms[arm].ended, time.perf_counter()
                with_them = [speed() for _ in range(BLOCK)]
                rate = (arms[arm].ended - before) / (time.perf_counter() - started)
                arms[arm].stop()
                alone += [speed() for _ in range(BLOCK // 2)]
                found[arm].append({
                    "tokens_per_s_without": statistics.median(alone),
                    "tokens_per_s_with": statistics.median(with_them),
                    "ratio": statistics.median(with_them) / statistics.median(alone),
                    "chains_per_s": rate,
                })  # fmt: skip
                print(arm, {name: round(value, 3) for name, value in found[arm][-1].items()}, flush=True)
        for each in arms.values():
            each.close()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "shape": shape,
        "chains": chains,
        "arms": {
            arm: {
                "ratio": statistics.median(block["ratio"] for block in blocks),
                "failed": arms[arm].failed,
                "blocks": blocks,
            }
            for arm, blocks in found.items()
        },
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(PROMPTS), default="0.5b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--chains", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args(argv)
    figures = measure(args.shape, args.chains, args.rounds)
    for arm, each in figures["arms"].items():
        print(
            f"{figures['device']}, {figures['shape']}, {figures['chains']} chains {arm} the process: speed "
            f"{each['ratio']:.3f} of that without, {each['failed']} failed"
        )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # with the processes that it has started
    main()
