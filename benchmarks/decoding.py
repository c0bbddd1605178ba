"""Milliseconds of a decoding step of a colocated vLLM, and what of them is the host's.

    .venv/bin/python -m benchmarks.decoding [--shape 7b|0.5b|tiny] [--arms graphs sync eager] [--json FILE]

Each arm is an engine with random weights in a process of its own: `graphs` has the options of a training, `sync` no
asynchronous scheduling, `eager` no CUDA graphs. It decodes 64 and 96 completions, 8 of a prompt, in three `WAYS`: this
package's loop (`ours`), the same with texts, and `LLM.generate` as stock TRL calls it. Medians of steps in which all
completions decode, from one call of `LLMEngine.step` to the next:

- `schedule`, `update`, `outputs`: the scheduler before and after the model, and what makes requests' outputs;
- `launch`: the host's work until the kernels of model and sampler are queued; in `sync` and on a CPU their time too;
- `rest`: waiting for the GPU, and what calls the engine. In `sync` the GPU waits for the other parts.

On a GPU, `graphs` then prints the GPU's time in such a step by kind of kernel, for 96 completions.
"""

import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2Config

from benchmarks.common import SHAPES, alone, kernels, parser, write_json
from benchmarks.peers.__main__ import name_all_tokens
from benchmarks.vllm_server import held_port
from salesrl_trl.config.rollouts import GRAPHS_ALONE
from salesrl_trl.demo.packaged import packaged_tokenizer
from salesrl_trl.generation.engine_loop import CompletionTasks, EngineLoop

ARMS: dict[str, dict[str, Any]] = {"graphs": {}, "sync": {"async_scheduling": False}, "eager": {"enforce_eager": True}}
WAYS: dict[str, dict[str, Any]] = {
    "ours": {"detokenize": False, "flat_logprobs": True},
    "ours, texts": {"flat_logprobs": True},
    "LLM.generate, texts": {},
}
SIZES, GROUP, SKIPPED, PROFILED = (64, 96), 8, 8, 64
PARTS = ("schedule", "launch", "update", "outputs")


class Watch:
    """Times `LLMEngine.step` from call to call, and its parts, in `steps`."""

    def __init__(self, engine: Any) -> None:
        self.steps: list[dict[str, float]] = []
        core, self._began = engine.engine_core.engine_core, 0.0
        self._parts: defaultdict[str, float] = defaultdict(float)
        for owner, name, part in (
            (core.scheduler, "schedule", "schedule"),
            (core.scheduler, "update_from_output", "update"),
            (core.model_executor, "execute_model", "launch"),
            (core.model_executor, "sample_tokens", "launch"),
            (engine.output_processor, "process_outputs", "outputs"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), part))
        self._step, engine.step = engine.step, self.step

    def _timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            found = call(*given, **named)
            self._parts[part] += 1000 * (time.perf_counter() - began)
            return found

        return timed

    def step(self) -> Any:
        now = time.perf_counter()
        if self._began:
            self.steps.append({**self._parts, "step": 1000 * (now - self._began)})
        self._parts.clear()
        self._began = now
        return self._step()

    def medians(self) -> dict[str, float]:
        """Of `steps`, without the first ones, which have prompts, and the last one."""
        kept = self.steps[SKIPPED:-1]
        found = {name: statistics.median(step.get(name, 0.0) for step in kept) for name in ("step", *PARTS)}
        return {**found, "rest": found["step"] - sum(found[part] for part in PARTS)}


def measure(arm: str, folder: str, prompt: int, tokens: int) -> list[dict[str, Any]]:
    """The rows of an arm, printed too. Call it in a process of its own."""
    with held_port() as port:  # as TRL
        alone_here = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in alone_here.items()} | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM, SamplingParams

    on_gpu = torch.cuda.is_available()
    options = {"enforce_eager": not on_gpu, **ARMS[arm]}
    if not options["enforce_eager"]:
        options["compilation_config"] = GRAPHS_ALONE
    llm = LLM(
        folder, load_format="dummy", dtype="bfloat16" if on_gpu else "float32", max_model_len=prompt + tokens,
        gpu_memory_utilization=0.35, max_num_seqs=max(SIZES), max_num_batched_tokens=4096,
        logprobs_mode="processed_logprobs", distributed_executor_backend="external_launcher", **options,
    )  # fmt: skip
    watch, rows = Watch(llm.llm_engine), []
    loop = EngineLoop(llm)

    def prompts(size: int) -> Any:
        llm.reset_prefix_cache()
        return [{"prompt_token_ids": [10 + place // GROUP, *range(100, 99 + prompt)]} for place in range(size)]

    name = f"{arm}, async {llm.llm_engine.vllm_config.scheduler_config.async_scheduling}"
    sampled = {"temperature": 1.0, "logprobs": 0, "ignore_eos": True, "max_tokens": tokens}
    for size in SIZES:
        for way, further in WAYS.items():
            watch.steps.clear()
            params = SamplingParams(**sampled, **further)
            if way.startswith("ours"):
                batch = CompletionTasks(size, loop, lambda *_, **__: None)
                batch.begin(prompts(size), [params] * size)
                loop.run(batch)
            else:
                llm.generate(prompts(size), params, use_tqdm=False)
            rows.append({"arm": name, "way": way, "sequences": size, **watch.medians()})
            told = " | ".join(f"{rows[-1][part]:.2f}" for part in ("step", *PARTS, "rest"))
            print(f"| {name} | {way} | {size} | {told} |", flush=True)
    if on_gpu and arm == "graphs":
        llm.enqueue(prompts(max(SIZES)), SamplingParams(**sampled, **WAYS["ours"]), use_tqdm=False)
        for _ in range(SKIPPED):
            llm.llm_engine.step()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(PROFILED):
                llm.llm_engine.step()
            torch.cuda.synchronize()
        rows.append({"arm": name, "kernels": kernels(found, per=PROFILED, prints=True)})
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the arms one after the other, and print each."""
    made, on_gpu = parser(__doc__), torch.cuda.is_available()
    made.add_argument("--shape", default="7b" if on_gpu else "tiny")
    made.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    made.add_argument("--prompt_tokens", type=int, default=1024 if on_gpu else 40)
    made.add_argument("--tokens", type=int, default=160 if on_gpu else 40, help="of a completion")
    args = made.parse_args(argv)
    head = ("arm", "way", "sequences", "step, ms", *PARTS, "rest")
    print(f"| {' | '.join(head)} |\n" + "|---" * len(head) + "|", flush=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        Qwen2Config(**SHAPES[args.shape], architectures=["Qwen2ForCausalLM"]).save_pretrained(
            folder
        )  # weights: random
        packaged_tokenizer().save_pretrained(folder)
        name_all_tokens(Path(folder))
        for arm in args.arms:
            rows += alone(measure, arm, folder, args.prompt_tokens, args.tokens)
            write_json(args.json, {"shape": args.shape, "rows": rows})


if __name__ == "__main__":
    main()
