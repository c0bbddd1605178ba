"""Seconds of a held-out evaluation with a slow reward function of a user's own: TRL's trainer and this one.

    .venv/bin/python -m benchmarks.evaluation [--rows 128] [--seconds 3] [--arms stock ours] [--vllm] [--json FILE]

On the CPU, with the packaged small policy. `trainer.evaluate()` answers each row twice, in batches of 16 completions.
A call of the function takes `--seconds`, whatever it scores: an async function of a batch, as TRL calls it.

- `stock` is TRL's own trainer. It generates with transformers;
- `ours` is this package's, with transformers, or with `--vllm` with vLLM in this process;
- `floor` is `ours` with calls that take no time: what generation and passes take.

Each arm evaluates a few rows first, so that nothing is measured that comes once. Seeds are the same for every arm, and
the mean reward is printed beside the seconds: with transformers it is the same number.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

from benchmarks.common import write_json
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.demo.packaged import PACKAGED
from salesrl_trl.trainer import SalesGRPOTrainer

GENERATIONS, BATCH, TOKENS = 2, 16, 32


def evaluated(arm: str, rows: int, seconds: float, use_vllm: bool, folder: Path) -> dict[str, Any]:
    """Seconds and mean reward of an evaluation."""
    pause_s = 0.0

    async def slow(completions: list[Any], **_: Any) -> list[float]:
        await asyncio.sleep(pause_s)
        return [len(completion[0]["content"]) % 17 / 17 for completion in completions]

    kind, config = (GRPOTrainer, GRPOConfig) if arm == "stock" else (SalesGRPOTrainer, SalesGRPOConfig)
    settings = {"use_vllm": True, "vllm_mode": "colocate"} if use_vllm and arm != "stock" else {}
    prompts = [[{"role": "user", "content": f"Question {place}: what is in it?"}] for place in range(rows)]
    dataset = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    args = config(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, seed=1,
        per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH, num_generations=GENERATIONS,
        max_completion_length=TOKENS, **settings,
    )  # fmt: skip
    trainer = kind(str(PACKAGED), slow, args, dataset, dataset)
    trainer.evaluate(dataset.select(range(BATCH)))
    set_seed(1)
    pause_s = 0.0 if arm == "floor" else seconds
    began = time.perf_counter()
    figures = trainer.evaluate()
    return {"arm": arm, "seconds": time.perf_counter() - began, "reward": figures["eval_reward"]}


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate with each arm, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128, help="held-out rows")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a call of the reward function")
    parser.add_argument("--arms", nargs="+", default=["stock", "ours", "floor"], choices=["stock", "ours", "floor"])
    parser.add_argument("--vllm", action="store_true", help="vLLM generates, but for `stock`")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    arguments = parser.parse_args(argv)
    figures = []
    for arm in arguments.arms:
        with tempfile.TemporaryDirectory() as folder:
            figure = evaluated(arm, arguments.rows, arguments.seconds, arguments.vllm, Path(folder))
        print(f"{arm:6} {figure['seconds']:7.1f} s, mean reward {figure['reward']:.6f}", flush=True)
        figures.append(figure)
    write_json(arguments.json, {"arms": figures})


if __name__ == "__main__":
    main()
