"""The arms on TRL's trainer: `stock`, and this package's `ours_N`, `ours_partial_N` (`partial_rollouts: 0.5`; 0.75 in
`ours_partial75_N`), `ours_stale_N` (`max_staleness: 2 N`), `ours_partial_stale_N`, `ours_server_N` and `pair_N`, N
steps ahead. `kept` in a name adds `kept_activations_gib: KEPT_GIB`, and `liger` Liger's kernels.

python -m benchmarks.peers.trl_arm PLAN OUT
"""

import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from benchmarks.lengths import fix_lengths, fix_server_lengths
from benchmarks.peers.clock import Clock
from benchmarks.peers.task import GROUP, RANK, RATE, Plan, batch_scored, scored, text_of
from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer, per_completion

GPU_SHARE = 0.35
"""Of the card's memory, for vLLM in the trainer's process."""
KEPT_GIB = 40
"""Activations of about 7,300 tokens with 7B and LoRA."""


@per_completion
async def one_scored(completion: Any, rag_s: float, judge_s: float) -> float:
    return await scored(text_of(completion), rag_s, judge_s)


def settings_of(plan: Plan, output_dir: str) -> dict[str, Any]:
    """Settings of all arms that run on a transformers trainer."""
    on_gpu = torch.cuda.is_available()
    return {
        "output_dir": output_dir, "use_cpu": not on_gpu, "bf16": on_gpu, "max_steps": plan.steps, "seed": 1,
        "per_device_train_batch_size": plan.micro_batch, "gradient_accumulation_steps": plan.micro_batches,
        "num_generations": GROUP, "max_completion_length": plan.tokens, "learning_rate": RATE, "temperature": 1.0,
        "lr_scheduler_type": "constant", "gradient_checkpointing": on_gpu, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip


def main(plan: Plan, out: Path) -> None:
    """Train, and write the figures."""
    stock, server = plan.arm == "stock", "server" in plan.arm
    dtype = getattr(torch, plan.dtype) if torch.cuda.is_available() else torch.float32
    model = AutoModelForCausalLM.from_pretrained(plan.folder, dtype=dtype)
    settings = settings_of(plan, plan.run) | {
        "beta": 0.0, "use_vllm": True, "vllm_mode": "server" if server else "colocate", "shuffle_dataset": False,
        "loss_type": "dapo",
    }  # fmt: skip
    settings |= (
        {"vllm_server_base_url": plan.url, "generation_kwargs": {"seed": 0}}  # the number of a sample
        if server
        else {"vllm_gpu_memory_utilization": GPU_SHARE, "vllm_max_model_length": plan.longest}
    )
    common: dict[str, Any] = {
        "train_dataset": Dataset.from_list(plan.conversations()), "callbacks": [Clock(plan, out)],
        "processing_class": AutoTokenizer.from_pretrained(plan.folder),
        "peft_config": None if plan.full else LoraConfig(r=RANK, target_modules="all-linear"),
    }  # fmt: skip
    trainer: GRPOTrainer
    if stock:
        trainer = GRPOTrainer(model, batch_scored, args=GRPOConfig(**settings), **common)
    else:
        config = SalesGRPOConfig(
            rollout_lookahead=plan.ahead,
            partial_rollouts=0.75 if "partial75" in plan.arm else 0.5 if "partial" in plan.arm else 0.0,
            kept_activations_gib=KEPT_GIB if "kept" in plan.arm else 0,
            max_staleness=2 * plan.ahead if "stale" in plan.arm else 0,
            use_liger_kernel="liger" in plan.arm,
            held_out_eval=False,
            max_sampling_logp_difference=math.inf,
            **settings,
        )
        trainer = SalesGRPOTrainer(model, one_scored, args=config, **common)
    generation = trainer.vllm_generation
    if server:
        fix_server_lengths(generation.vllm_client, plan.tokens, plan.lengths)
    else:
        fix_lengths(generation.llm, plan.tokens, plan.lengths)
    trainer.train()
    if not stock:
        trainer.finish()  # type: ignore[attr-defined]
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    from benchmarks.peers import trl_arm  # under this name the process of the rewards finds its function

    trl_arm.main(Plan.read(Path(sys.argv[1])), Path(sys.argv[2]))
