"""What vLLM's settings do for the speed of generation: graphs, prefix caching, chunked prefill, tensor parallelism.

    .venv/bin/python -m benchmarks.engine [--shape 7b|0.5b|tiny] [--arms graphs eager ...] [--json FILE]

Each arm is an engine with random weights in a process of its own. It generates, after a round to warm up,

- `alone`: one completion of a short prompt;
- `group`: 8 completions for each of 8 prompts, which are long.

Prompts are new in each round, so that only what a group has in common can be taken from the cache. Completions have
their full length. The figures are medians over rounds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.common import device, device_name, parser, save_model, write_json
from benchmarks.service import GENERATIONS
from salesrl_trl.config.rollouts import GRAPHS_ALONE

if TYPE_CHECKING:
    from vllm import LLM

ARMS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "no_prefix_caching": {"enable_prefix_caching": False},
    "no_chunked_prefill": {"enable_chunked_prefill": False},
    "graphs_alone": {"compilation_config": GRAPHS_ALONE},
    "tensor_parallel": {"tensor_parallel_size": 2},
}
"""The arms, with what differs from an engine with CUDA graphs, prefix caching and chunked prefill."""
PROMPTS = 8
SIZES = {"7b": (2048, 256), "0.5b": (2048, 256), "tiny": (96, 16)}
"""Tokens of a long prompt, and of a completion."""
ROUNDS = 3


def measure(engine: "LLM", prompt: int, completion: int) -> dict[str, float]:
    """Median seconds by workload, and tokens a second.

    Args:
        prompt (`int`):
            Tokens of a long prompt.
        completion (`int`):
            Tokens of each completion.
    """
    from vllm import SamplingParams

    def seconds(number: int, prompts: int, length: int, samples: int) -> float:
        texts: Any = [{"prompt_token_ids": [10 + number, 20 + i, *range(100, 98 + length)]} for i in range(prompts)]
        settings = SamplingParams(n=samples, max_tokens=completion, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = engine.generate(texts, settings, use_tqdm=False)
        taken = time.perf_counter() - start
        assert {len(each.token_ids) for output in outputs for each in output.outputs} == {completion}
        return taken

    found = {}
    for name, sizes in {"alone": (1, 16, 1), "group": (PROMPTS, prompt, GENERATIONS)}.items():
        taken = [seconds(number, *sizes) for number in range(ROUNDS + 1)][1:]
        found[f"{name}_s"] = statistics.median(taken)
        found[f"{name}_tokens_per_s"] = sizes[0] * sizes[2] * completion / found[f"{name}_s"]
    return found


def work(arm: str, shape: str, model: Path, out: Path) -> None:
    """Measure an arm in this process."""
    from vllm import LLM

    (prompt, completion), start = SIZES[shape], time.perf_counter()
    settings = {"enable_prefix_caching": True, "enable_chunked_prefill": True, **ARMS[arm]}
    engine = LLM(
        str(model), skip_tokenizer_init=True, load_format="dummy", max_model_len=prompt + completion,
        gpu_memory_utilization=0.6, **settings,
    )  # fmt: skip
    figures = {"start_s": time.perf_counter() - start, **measure(engine, prompt, completion)}
    write_json(out, figures)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure the arms one after the other, and print each."""
    made = parser(__doc__)
    made.add_argument("--shape", choices=sorted(SIZES), default="7b" if torch.cuda.is_available() else "tiny")
    made.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS)[: 5 + (torch.cuda.device_count() > 1)])
    made.add_argument("--worker", help=argparse.SUPPRESS)
    made.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = made.parse_args(argv)
    if args.worker:
        work(args.worker, args.shape, args.model, args.json)
        return {}
    figures: dict[str, Any] = {"device": device_name(device()), "shape": args.shape, "arms": {}}
    with tempfile.TemporaryDirectory() as scratch:
        model, out = save_model(args.shape, Path(scratch, "model"), device()), Path(scratch, "arm.json")
        torch.cuda.empty_cache()
        for arm in args.arms:
            command = [sys.executable, "-m", "benchmarks.engine", "--worker", arm, "--shape", args.shape]
            done = subprocess.run(
                [*command, "--model", str(model), "--json", str(out)],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                print(f"{arm}: failed\n{(done.stdout + done.stderr)[-3000:]}", flush=True)
                continue
            figures["arms"][arm] = each = json.loads(out.read_text())
            print(
                f"{arm}: starts in {each['start_s']:.1f} s; one completion {each['alone_s']:.2f} s "
                f"({each['alone_tokens_per_s']:.0f} tokens/s); {PROMPTS} groups {each['group_s']:.2f} s "
                f"({each['group_tokens_per_s']:.0f} tokens/s)",
                flush=True,
            )
            write_json(args.json, figures)
    return figures


if __name__ == "__main__":
    main()
