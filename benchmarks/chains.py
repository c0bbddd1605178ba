"""The cost of reward chains for vLLM's generation: its speed with chains in flight over its speed without.

    .venv/bin/python -m benchmarks.chains [--chains 256] [--rounds 2] [--shape 0.5b|tiny] [--json FILE]

- Chains are Python code, and so is vLLM's engine.
- The chains are real: parse, both RAG endpoints, judge, score, caches.
- They run on an event loop in a thread of its own, as in training: arm `inside` in this process, arm `beside` in a
  child (`reward_process`).
- `--chains` of them are in flight all the time: a new one follows each one that ends. The service is another process
  and takes about 5.6 s and 3.2 s.
- Meanwhile the main thread generates completions of fixed length.
- Each block with chains stands between two blocks without. It begins when the first chains have ended. The next block
  begins when no call is in flight any more.
"""

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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from benchmarks.common import device, device_name, parser, save_model, write_json
from benchmarks.service import BRANCHES, service, set_medians
from salesrl_trl.judged.chain import SalesReward
from salesrl_trl.launch.assembly import build_reward
from salesrl_trl.launch.checks.reward import prepare_reward
from salesrl_trl.launch.data.sources import load_rows
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.reward.batch import RewardBatch, wait_for
from salesrl_trl.reward.remote import RemoteReward

PROMPTS = {"0.5b": 64, "tiny": 16}
TOKENS = {"0.5b": 256, "tiny": 96}


class Chains:
    """A number of chains in flight, on a loop of their own.

    Args:
        reward (`SalesReward` or `RemoteReward`):
            Scores.
        rows (`int`):
            Number of rows that it knows.
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
        """Put `count` chains in flight, and wait until as many have ended: they are spread over time by then."""
        self._running, before = True, self.ended
        for _ in range(count):
            asyncio.run_coroutine_threadsafe(self._one_after_another(), self._loop)
        while self.ended < before + count:
            time.sleep(0.1)

    def stop(self) -> None:
        """Start no more chains, and wait until those in flight have ended."""
        self._running = False
        while self.in_flight:
            time.sleep(0.1)

    def close(self) -> None:
        """Close the connections, and end the child."""
        asyncio.run_coroutine_threadsafe(self._reward.aclose(), self._loop).result()

    async def _one_after_another(self) -> None:
        self.in_flight += 1
        while self._running:
            self._number += 1
            number = self._number
            fields = {"user_profile": "A nurse with evenings free", "rewritten_query": f"price of course {number}",
                      "history_summary": "Asked for the price, then for the dates. " * 3}  # fmt: skip
            batch = RewardBatch(self._reward, [{"row": number % self._rows}])
            batch.start(0, json.dumps(fields))
            await wait_for([batch], partial(batch.has_settled, [[0]]))
            self.ended += 1
            self.failed += batch.rewards[0] is None or batch.rewards[0].value is None
        self.in_flight -= 1


def measure(shape: str, chains: int, rounds: int, batches: int, medians_s: Sequence[float]) -> dict[str, Any]:
    """Tokens a second with chains and without, by the arm.

    Args:
        batches (`int`):
            Batches that are generated with chains in flight, in a block.
        medians_s (`Sequence[float]`):
            Median seconds of a call to the RAG service and to the judge.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, as TRL has it
    from vllm import LLM, SamplingParams

    where = device()
    set_seed(0)
    rows = load_rows("demo", "train", list(BRANCHES), None)
    limits = dict.fromkeys(("rag_max_concurrency", "judge_max_concurrency", "initial_concurrency"), 1024)
    config = RewardConfig(hedge_fraction=0.0, **limits)
    with tempfile.TemporaryDirectory() as scratch, service() as url:
        set_medians(url, medians_s)
        llm = LLM(
            str(save_model(shape, Path(scratch, "model"), where)), skip_tokenizer_init=True,
            gpu_memory_utilization=0.4, max_model_len=1024, enforce_eager=where.type == "cpu",
            logprobs_mode="processed_logprobs",
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
            parts = prepare_reward(config, list(BRANCHES))
            return build_reward(config, parts, rows, url, f"{url}/v1", output_dir=Path(tempfile.mkdtemp(dir=scratch)))

        arms = {"inside": Chains(chain(), len(rows)), "beside": Chains(RemoteReward(chain()), len(rows))}
        found: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
        speed()  # to warm up
        for number in range(rounds):
            for arm in arms if number % 2 == 0 else reversed(arms):
                alone = [speed() for _ in range(batches // 2)]
                arms[arm].start(chains)
                before, started = arms[arm].ended, time.perf_counter()
                with_them = [speed() for _ in range(batches)]
                rate = (arms[arm].ended - before) / (time.perf_counter() - started)
                arms[arm].stop()
                alone += [speed() for _ in range(batches // 2)]
                found[arm].append({
                    "tokens_per_s_without": statistics.median(alone),
                    "tokens_per_s_with": statistics.median(with_them),
                    "ratio": statistics.median(with_them) / statistics.median(alone),
                    "chains_per_s": rate,
                })  # fmt: skip
                print(arm, {name: round(value, 3) for name, value in found[arm][-1].items()}, flush=True)
        for each in arms.values():
            each.close()
    ratios = {arm: statistics.median(block["ratio"] for block in blocks) for arm, blocks in found.items()}
    return {
        "device": device_name(where),
        "shape": shape,
        "chains": chains,
        "arms": {arm: {"ratio": ratios[arm], "failed": arms[arm].failed, "blocks": found[arm]} for arm in arms},
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--shape", choices=sorted(PROMPTS), default="0.5b" if torch.cuda.is_available() else "tiny")
    made.add_argument("--chains", type=int, default=256, help="chains in flight")
    made.add_argument("--rounds", type=int, default=2, help="blocks of each arm")
    made.add_argument("--batches", type=int, default=6, help="batches generated with chains in flight, in a block")
    made.add_argument(
        "--latency", nargs=2, type=float, default=(5.6, 3.2), metavar=("RAG_S", "JUDGE_S"),
        help="median seconds of a call to each service",
    )  # fmt: skip
    args = made.parse_args(argv)
    figures = measure(args.shape, args.chains, args.rounds, args.batches, args.latency)
    for arm, each in figures["arms"].items():
        print(
            f"{figures['device']}, {figures['shape']}, {figures['chains']} chains {arm} the process: speed "
            f"{each['ratio']:.3f} of that without, {each['failed']} failed"
        )
    write_json(args.json, figures)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # ends its child processes too
    main()
