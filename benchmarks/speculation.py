"""Speculative rollouts: vLLM's n-gram and suffix drafts in a GRPO run, on a policy that has learnt something.

    python -m benchmarks.speculation [--policy packaged|taught|DIR] [--arms none ngram suffix] [--steps 30]

- `packaged` is the demo's policy. `taught` is one of `--shape`, which learns the demo's drafts first, by `--taught`
  steps of supervised fine-tuning; `--keep DIR` keeps it.
- Each arm is a process of its own, with the same seed, rows and settings: 64 completions a step, 8 for each prompt of
  the demo, temperature 1, at most 96 tokens. The reward is how much of the careful action a completion has.
- An arm is a `speculative_config` of vLLM, which gets there by `vllm_engine_kwargs`. Drafts are accepted so that
  completions have the distribution of the policy.
- Of each step it takes the seconds and tokens of generation, the share of drafted tokens that were accepted, the
  share of all tokens that were, the reward, and how far the sampler's log-probs are from the trainer's.
- `suffix` needs `arctic_inference.suffix_decoding` beside vLLM.
"""

import argparse
import difflib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

from benchmarks.common import device, device_name, now, parser, quiet, write_json
from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer, per_completion
from salesrl_trl.data.files import demo_records
from salesrl_trl.demo.packaged import PACKAGED, PROMPT_STYLE, packaged_tokenizer
from salesrl_trl.launch.data.prompts import build_prompt
from salesrl_trl.launch.data.sources import load_drafts

ARMS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "ngram_8": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
}
SHAPES = {  # hidden size, layers, heads, MLP
    "tiny": (128, 2, 4, 384),
    "0.1b": (768, 12, 12, 3072),
    "0.5b": (1280, 22, 20, 5120),
}
TOKENS = 96
COUNTS = {"drafted": "vllm:spec_decode_num_draft_tokens", "accepted": "vllm:spec_decode_num_accepted_tokens"}
LOGP_DIFFERENCE = "sampling/sampling_logp_difference/mean"


@per_completion
async def careful(completion: Any, target: str) -> float:
    """How much of the careful action it has, from 0 to 1."""
    return difflib.SequenceMatcher(None, completion[0]["content"], target, autojunk=False).ratio()


def teach(folder: Path, shape: str, steps: int) -> None:
    """A policy that has learnt the demo's drafts."""
    set_seed(0)
    tokenizer, (hidden, layers, heads, mlp) = packaged_tokenizer(), SHAPES[shape]
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=3072, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=512,
            tie_word_embeddings=False, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    rows = [
        {"prompt": build_prompt(row, PROMPT_STYLE), "completion": [{"role": "assistant", "content": action}]}
        for row, drafts in load_drafts()
        for action in (json.dumps(draft, ensure_ascii=False) for draft in drafts)
    ]
    on_gpu = torch.cuda.is_available()
    args = SFTConfig(
        output_dir=tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=64, learning_rate=5e-4,
        lr_scheduler_type="cosine", warmup_steps=steps // 20, logging_steps=max(steps // 5, 1), save_strategy="no",
        report_to="none", disable_tqdm=True, bf16=on_gpu, use_cpu=not on_gpu, gradient_checkpointing=False,
        max_length=512,
    )  # fmt: skip
    SFTTrainer(model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer).train()
    model.config.use_cache = True
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def demo_rows() -> Dataset:
    """The demo's prompts, each with its careful action."""
    actions = [json.dumps(record["careful_action"], ensure_ascii=False) for record in demo_records("train.jsonl")]
    pairs = zip(load_drafts(), actions, strict=True)
    return Dataset.from_list([{"prompt": build_prompt(row, PROMPT_STYLE), "target": t} for (row, _), t in pairs])


def counts_of(llm: Any) -> dict[str, int]:
    """What vLLM has drafted and accepted so far."""
    found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {name: int(found.get(metric, 0)) for name, metric in COUNTS.items()}


class Watch(TrainerCallback):
    """Figures of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.generations: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            names = {"reward": "reward", "logp_off": LOGP_DIFFERENCE, "entropy": "entropy"}
            self.steps.append({name: logs[key] for name, key in names.items() if logs.get(key) is not None})


def work(arm: str, args: argparse.Namespace) -> None:
    """Train in the process of an arm, and write the figures."""
    where, watch = device(), Watch()
    engine: dict[str, Any] = {"disable_log_stats": False}
    if ARMS[arm]:
        engine["speculative_config"] = ARMS[arm]
    config = SalesGRPOConfig(
        beta=0.0, held_out_eval=False, max_sampling_logp_difference=math.inf, vllm_engine_kwargs=engine,
        **quiet(
            where, tempfile.mkdtemp(), per_device_train_batch_size=args.completions // 2,
            gradient_accumulation_steps=2, max_completion_length=TOKENS, max_steps=args.steps, use_vllm=True,
            vllm_mode="colocate", vllm_gpu_memory_utilization=0.3, vllm_max_model_length=512, seed=1,
            lr_scheduler_type="constant", dataloader_pin_memory=False, logging_steps=1,
        ) | {"learning_rate": args.rate},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(args.policy, dtype=torch.float32)
    trainer = SalesGRPOTrainer(
        model, [careful], args=config, train_dataset=demo_rows(), processing_class=packaged_tokenizer(),
        callbacks=[watch],
    )  # fmt: skip
    llm = trainer.vllm_generation.llm
    generate = llm.generate

    def timed(*arguments: Any, **named: Any) -> Any:
        before, began = counts_of(llm), now()
        outputs = generate(*arguments, **named)
        seconds, after = now() - began, counts_of(llm)
        tokens = sum(len(each.token_ids) for output in outputs for each in output.outputs)
        made = {name: after[name] - before[name] for name in COUNTS}
        watch.generations.append({"seconds": seconds, "tokens": tokens, **made})
        return outputs

    llm.generate = timed
    trainer.train()
    trainer.finish()
    args.out.write_text(json.dumps({"generations": watch.generations, "steps": watch.steps}))
    sys.stdout.flush()
    os._exit(0)


def run(arm: str, args: argparse.Namespace, folder: Path, scratch: Path) -> dict[str, Any]:
    """An arm's figures, or the end of its log."""
    out, log = scratch / f"{arm}.json", scratch / f"{arm}.log"
    command = [sys.executable, "-m", "benchmarks.speculation", "--worker", arm, "--policy", str(folder)]
    command += ["--steps", str(args.steps), "--rate", str(args.rate), "--out", str(out)]
    command += ["--completions", str(args.completions)]
    with log.open("wb") as stream:
        ended = subprocess.run(command, stdout=stream, stderr=stream, timeout=args.limit, check=False).returncode
    if not out.is_file():
        return {"arm": arm, "ended": ended, "log": log.read_text(errors="replace")[-2500:]}
    return {"arm": arm, "ended": ended, **json.loads(out.read_text())}


def line(found: dict[str, Any], third: int) -> str:
    """A row for a third of the run."""
    size = len(found["generations"]) // 3
    part = slice(size * third + (third == 0), size * (third + 1))  # the first step warms up
    generations, steps = found["generations"][part], found["steps"][part]
    total = {name: sum(each[name] for each in generations) for name in generations[0]}
    accepted = f"{total['accepted'] / total['drafted']:.2f}" if total["drafted"] else "-"
    means = [
        statistics.mean(values) if (values := [each[name] for each in steps if name in each]) else math.nan
        for name in ("reward", "entropy", "logp_off")
    ]
    seconds = statistics.median(each["seconds"] for each in generations)
    per_token = 1e6 * total["seconds"] / total["tokens"]
    shown = "".join(f" {value:.4f} |" for value in means)
    return (
        f"| {found['arm']} | {third + 1} | {seconds:.3f} s | {per_token:.1f} us | {total['tokens']} | {accepted} "
        f"| {total['accepted'] / total['tokens']:.2f} |{shown}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Teach, run the arms, print."""
    on_gpu = torch.cuda.is_available()
    made = parser(__doc__)
    made.add_argument("--policy", default="packaged", help="`packaged`, `taught` or a folder")
    made.add_argument("--shape", choices=sorted(SHAPES), default="0.1b" if on_gpu else "tiny")
    made.add_argument("--taught", type=int, default=600, help="steps of supervised fine-tuning")
    made.add_argument("--keep", type=Path, help="folder for the taught policy")
    made.add_argument("--arms", nargs="+", choices=sorted(ARMS), default=["none", "ngram", "suffix"])
    made.add_argument("--steps", type=int, default=30, help="at least 6")
    made.add_argument("--completions", type=int, default=64 if on_gpu else 16, help="of a step")
    made.add_argument("--rate", type=float, default=5e-5)
    made.add_argument("--limit", type=int, default=240, help="seconds of an arm")
    made.add_argument("--worker", help=argparse.SUPPRESS)
    made.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = made.parse_args(argv)
    if args.worker:
        return work(args.worker, args)
    print(
        f"{args.policy} on {device_name(device())}, {args.steps} steps of {args.completions} completions", flush=True
    )
    figures = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = {"packaged": PACKAGED, "taught": args.keep or Path(scratch) / "taught"}.get(
            args.policy, Path(args.policy)
        )
        if args.policy == "taught":
            began = time.perf_counter()
            teach(folder, args.shape, args.taught)
            print(f"taught in {time.perf_counter() - began:.0f} s", flush=True)
            torch.cuda.empty_cache()
        print("| arm | third | generation | a token | tokens | accepted | of all | reward | entropy | log-prob off |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        for arm in args.arms:
            found = run(arm, args, folder, Path(scratch))
            figures.append(found)
            rows = [line(found, third) for third in range(3)] if "steps" in found else [str(found)]
            print("\n".join(rows), flush=True)
            write_json(args.json, {"policy": args.policy, "arms": figures})


if __name__ == "__main__":
    from benchmarks import speculation  # under this name the process of the rewards finds its function

    speculation.main()
