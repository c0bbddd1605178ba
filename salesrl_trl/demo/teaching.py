"""Supervised fine-tuning of the demo's small policies, by TRL.

Owns the settings that both policies have in common. `vision` and `scripts/make_demo_policy.py` call it: they own what
is imitated, and how long.
"""

import tempfile
from typing import TYPE_CHECKING

from salesrl_trl.ground.process import keep_freed_memory

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin


def imitate(
    model: "PreTrainedModel",
    processing_class: "PreTrainedTokenizerBase | ProcessorMixin",
    rows: "Dataset",
    *,
    steps: int,
    warmup: float,
    **settings: object,
) -> None:
    """Teach a model to write the completions of some rows, on a GPU if there is one, in float32. The rows have the
    columns `prompt` and `completion`, and `images` for a policy that reads pictures. `warmup` is the share of the
    steps in which the learning rate rises, `settings` are further ones of `SFTConfig`. The model is changed."""
    import torch
    from trl import SFTConfig, SFTTrainer

    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        keep_freed_memory()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = SFTConfig(
            output_dir=scratch,
            max_steps=steps,
            lr_scheduler_type="cosine",
            warmup_steps=int(warmup * steps),
            logging_steps=max(steps // 20, 1),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=on_cpu,
            **settings,
        )
        SFTTrainer(model, args=arguments, train_dataset=rows, processing_class=processing_class).train()
