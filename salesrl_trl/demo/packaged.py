"""What the package holds in place of a user's model and services: a small policy, and a record of the demo's services.

The policy is a Qwen2 model with its tokenizer: `scripts/make_demo_policy.py` teaches it. The record has what the
services said of some completions of every row: `scripts/make_demo_cassette.py` makes it.
"""

import tempfile
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from salesrl_trl.ground.process import keep_freed_memory

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

PACKAGED = Path(__file__).with_name("small_policy")  # the folder of the policy. `from_pretrained` loads it.
ARITHMETIC_POLICY = Path(__file__).with_name("arithmetic_policy")
"""The policy of `recipes/own.py`: it adds two numbers, and is wrong more often than right. It is taught by
`scripts/make_arithmetic_policy.py`."""
DUAL_POLICY = Path(__file__).with_name("dual_policy")
"""The policy of `recipes/dual.py`: it answers questions of two tasks, and often takes the bait. It is taught by
`scripts/make_dual_policy.py`."""
VISION_POLICY = Path("runs/vision_policy")  # of the preset `vision`, where `scripts/make_vision_policy.py` writes it
POLICY_OF = {"arithmetic": ARITHMETIC_POLICY, "demo_bbq": DUAL_POLICY, "demo_halueval": DUAL_POLICY}
"""By packaged dataset, the policy that knows it. `PACKAGED` knows the others."""
PROMPT_STYLE = "compact"
"""The style of the prompts that it was taught with. A run with this policy must use the same one."""


def packaged_tokenizer() -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(PACKAGED)


CASSETTE = "demo"  # name of the record in the setting `replay`
FILE = Path(str(files("salesrl_trl.demo") / "cassette.sqlite.gz"))
"""The record, without prompts, answers, verdicts and calls, which a replay does not need."""


def imitate(
    model: "PreTrainedModel",
    processing_class: "PreTrainedTokenizerBase | ProcessorMixin",
    rows: "Dataset",
    *,
    steps: int,
    warmup: float,
    **settings: object,
) -> None:
    """Teach a model, which is changed, to write the `completion` of some rows to their `prompt` (and `images`), on a
    GPU if there is one, in float32. `warmup` is a share of the steps, `settings` are further ones of `SFTConfig`."""
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
