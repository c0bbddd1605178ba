"""How the scripts that make the demos' policies teach them: supervised fine-tuning on drafts of actions."""

import tempfile

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from trl import SFTConfig, SFTTrainer

from salesrl_trl.launch.kept import keep_freed_memory


def imitate(
    model: PreTrainedModel,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
    rows: Dataset,
    *,
    steps: int,
    warmup: float,
    **settings: object,
) -> None:
    """Teach a model, which is changed, to write the `completion` of some rows to their `prompt` (and `images`), on a
    GPU if there is one, in float32. `warmup` is a share of the steps, `settings` are further ones of `SFTConfig`."""
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
