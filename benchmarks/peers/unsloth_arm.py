"""Unsloth's arm: TRL's trainer as Unsloth rewrites it, with its own vLLM engine that shares the weights.

python -m benchmarks.peers.unsloth_arm PLAN OUT
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
os.environ.setdefault("UNSLOTH_VLLM_STANDBY", "0")
os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", tempfile.mkdtemp())

import unsloth  # noqa: F401  before TRL, which it rewrites
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from unsloth import FastLanguageModel

from benchmarks.lengths import fix_lengths
from benchmarks.peers.clock import Clock
from benchmarks.peers.task import GROUP, RANK, RATE, Plan, batch_scored

GPU_SHARE = 0.5
"""Of the card's memory, for vLLM with the weights that the trainer uses too."""
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def settings_of(plan: Plan) -> dict[str, Any]:
    """TRL's settings, as in the arm `stock`."""
    return {
        "output_dir": tempfile.mkdtemp(), "bf16": True, "max_steps": plan.steps, "seed": 1, "learning_rate": RATE,
        "per_device_train_batch_size": plan.micro_batch, "gradient_accumulation_steps": plan.micro_batches,
        "num_generations": GROUP, "max_completion_length": plan.tokens, "temperature": 1.0, "beta": 0.0,
        "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "use_vllm": True, "shuffle_dataset": False, "dataloader_pin_memory": False,
        "loss_type": "dapo", "max_prompt_length": None, "mask_truncated_completions": False,  # all are, here
    }  # fmt: skip


def main(plan: Plan, out: Path) -> None:
    """Train, and write the figures."""
    model, tokenizer = FastLanguageModel.from_pretrained(
        plan.folder, max_seq_length=plan.longest, load_in_4bit=False, fast_inference=True, max_lora_rank=RANK,
        gpu_memory_utilization=GPU_SHARE, dtype="bfloat16",
    )  # fmt: skip
    model = FastLanguageModel.get_peft_model(
        model, r=RANK, target_modules=LINEAR, lora_alpha=RANK, use_gradient_checkpointing="unsloth", random_state=1
    )
    known = GRPOConfig.__dataclass_fields__
    settings = {name: value for name, value in settings_of(plan).items() if name in known}
    trainer = GRPOTrainer(
        model, [batch_scored], args=GRPOConfig(**settings), train_dataset=Dataset.from_list(plan.conversations()),
        processing_class=tokenizer, callbacks=[Clock(plan, out)],
    )  # fmt: skip
    fix_lengths(trainer.vllm_generation.llm, plan.tokens, plan.lengths)
    trainer.train()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Plan.read(Path(sys.argv[1])), Path(sys.argv[2]))
