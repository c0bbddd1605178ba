"""A step's generation against vLLM alone: the same requests, the same engine, in one run.

    .venv/bin/python -m benchmarks.generation [--shape 7b|0.5b|tiny] [--prompt_tokens 1024] [--profile FILE]

Trains some steps with random weights, 64 completions of exactly `--tokens` tokens, and rewards that answer at once, in
a process of their own. Of each step's generation it takes the time of all, inside the engine's loop, and of that the
time in which rewards are started. Then `LLM.generate` gets the same requests again, as TRL makes them and with flat
log-probs as the loop has them; the ratio is the time inside by that as TRL makes them. The first step is not counted.
"""

import cProfile
import math
import pstats
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from benchmarks.common import device, device_name, dtype, now, parser, quiet, rows_of, save_model, write_json
from benchmarks.pipeline import TEMPLATE, WORDS
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.demo.packaged import packaged_tokenizer
from salesrl_trl.generation.engine_loop import CompletionTasks
from salesrl_trl.generation.sampler import ready
from salesrl_trl.ground.process import patched
from salesrl_trl.reward.functions import per_completion
from salesrl_trl.trainer import SalesGRPOTrainer

PROMPTS, GROUP = 8, 8


@per_completion
async def length(completion: Any) -> float:
    return float(len(str(completion)) % 7)


def measure(folder: Path, tokens: int, args: Any) -> dict[str, Any]:
    """Seconds of a step's generation, and of vLLM alone."""
    where, on_gpu, tokenizer = device(), torch.cuda.is_available(), packaged_tokenizer()
    draw, texts = random.Random(0), []
    for _ in range(PROMPTS * args.steps):
        ids = tokenizer(" ".join(draw.choices(WORDS, k=tokens)))["input_ids"]
        texts.append(tokenizer.decode(ids[:tokens], skip_special_tokens=True))
    kwargs = {"max_tokens": args.tokens, "ignore_eos": True, "detokenize": args.detokenize}
    config = SalesGRPOConfig(
        beta=0.0, held_out_eval=False, max_sampling_logp_difference=math.inf, reward_process=True,
        **quiet(
            where, tempfile.mkdtemp(), per_device_train_batch_size=8, gradient_accumulation_steps=8,
            num_generations=GROUP, max_completion_length=args.tokens, max_steps=args.steps, use_vllm=True,
            vllm_mode="colocate", vllm_gpu_memory_utilization=0.35, gradient_checkpointing=on_gpu,
            vllm_max_model_length=tokens + TEMPLATE + args.tokens, shuffle_dataset=False, dataloader_pin_memory=False,
            lr_scheduler_type="constant", generation_kwargs=kwargs,
            vllm_engine_kwargs={"enforce_eager": False} if args.compiled else None,
        ),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype(where))
    trainer = SalesGRPOTrainer(
        model, [length], args=config, train_dataset=Dataset.from_list(rows_of(texts)), processing_class=tokenizer,
        peft_config=LoraConfig(r=16, target_modules="all-linear") if on_gpu else None,
    )  # fmt: skip
    llm, sampler = trainer.vllm_generation.llm, trainer.components.sampler
    loop = trainer.vllm_generation.loop
    run, enqueue, start, profile = loop.run, llm.enqueue, sampler.start, cProfile.Profile()
    came, starting = CompletionTasks._came, [0.0]
    inside: list[float] = []
    whole: list[float] = []
    requests: list[tuple[Any, Any]] = []

    def noted(prompts: Any, sampling_params: Any, **kwargs: Any) -> Any:
        params = sampling_params.clone()
        params.detokenize = params.flat_logprobs = False
        requests.append((prompts, params))
        return enqueue(prompts, sampling_params=sampling_params, **kwargs)

    def timed_came(tasks: CompletionTasks, place: int, answer: Any) -> None:
        began = now()
        came(tasks, place, answer)
        starting[-1] += now() - began

    def timed(batch: Any, *, ahead: bool = False) -> None:
        if batch.is_over:  # its results are asked for
            return
        began = now()
        if args.profile and len(whole) == args.steps - 1:
            profile.runcall(run, batch, ahead=ahead)
        else:
            run(batch, ahead=ahead)
        inside.append(now() - began)
        starting.append(0.0)

    def timed_start(*arguments: Any, **named: Any) -> Any:
        began = now()
        sampled = start(*arguments, **named).result()
        whole.append(now() - began)
        return ready(sampled)

    loop.run, llm.enqueue, sampler.start = timed, noted, timed_start
    with patched(CompletionTasks, "_came", timed_came):
        trainer.train()
    llm.enqueue = enqueue
    pushes = [line["time/weight_push_s"] for line in trainer.state.log_history if "time/weight_push_s" in line]
    alone: list[float] = []
    alone_flat: list[float] = []
    for seconds, flat in ((alone, False), (alone_flat, True)):
        for prompts, params in requests:
            llm.reset_prefix_cache()
            params.flat_logprobs = flat
            began = now()
            llm.generate(prompts, sampling_params=params, use_tqdm=False)
            seconds.append(now() - began)
    trainer.finish()
    if args.profile:
        with args.profile.open("a") as out:
            pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(45)
    return {
        "prompt_tokens": tokens, "whole": whole, "inside": inside, "starting": starting[:-1], "alone": alone,
        "alone, flat": alone_flat, "pushes": pushes,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    made = parser(__doc__)
    on_gpu = torch.cuda.is_available()
    made.add_argument("--shape", default="7b" if on_gpu else "tiny")
    made.add_argument("--prompt_tokens", type=int, default=1024 if on_gpu else 40)
    made.add_argument("--tokens", type=int, default=256 if on_gpu else 24, help="of a completion")
    made.add_argument("--steps", type=int, default=5)
    made.add_argument("--compiled", action="store_true", help="vLLM compiles the model, and not CUDA graphs alone")
    made.add_argument("--detokenize", action="store_true", help="vLLM makes texts, as for stock TRL")
    made.add_argument("--model", type=Path, help="folder of weights made before, or where they are to be kept")
    made.add_argument("--profile", type=Path, help="add a profile of the last step's loop to this file")
    args = made.parse_args(argv)
    print(f"{args.shape} on {device_name(device())}, {args.tokens} tokens a completion", flush=True)
    print(
        "| prompt | generation of a step | inside the loop | of it, starting rewards | alone | alone, flat | ratio |"
    )
    print("|---" * 7 + "|")
    figures = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or Path(scratch) / "model"
        if not folder.is_dir():
            save_model(args.shape, folder, device())
        torch.cuda.empty_cache()
        began = time.perf_counter()
        figures.append(measure(folder, args.prompt_tokens, args))
        names = ("whole", "inside", "starting", "alone", "alone, flat")
        whole, inside, starting, alone, flat = (statistics.median(figures[-1][name][1:]) for name in names)
        print(
            f"| {args.prompt_tokens} | {whole:.2f} s | {inside:.2f} s | {starting:.3f} s | {alone:.2f} s "
            f"| {flat:.2f} s | {inside / alone:.3f} |",
            flush=True,
        )
        print(figures[-1], f"{time.perf_counter() - began:.0f} s in all", flush=True)
    write_json(args.json, {"shape": args.shape, "rows": figures})


if __name__ == "__main__":
    from benchmarks import generation  # under this name the process of the rewards finds its function

    generation.main()
