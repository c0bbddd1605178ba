"""The policy of a run that names no model: a small Qwen2 model and its tokenizer. It needs no hub.

Owns how this policy is made, and its place in the cache. The warm start imitates the demo's draft actions. They are
valid, and many are careless, so that GRPO has much to improve.

`python -m salesrl_trl.demo.policy DIR` makes one. `cached_policy` runs this command in a process of its own. So the
warm start joins no process group of a distributed run, and leaves no memory behind.
"""

import argparse
import hashlib
import inspect
import itertools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from salesrl_trl.data.prompts import action_text, build_prompt, template_path
from salesrl_trl.data.sources import demo_path, load_drafts
from salesrl_trl.errors import ConfigError, SalesRLError
from salesrl_trl.process import cache_dir, child_environment, keep_freed_memory
from salesrl_trl.types import Action

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

VOCAB_SIZE = 3072
HIDDEN_SIZE = 128
LAYERS = 2
HEADS = 4
"""Each head has size 32, the smallest that vLLM's CPU attention accepts."""
MLP_SIZE = 384
MAX_POSITIONS = 512
BATCH_SIZE = 32
LEARNING_RATE = 8e-3
WARMUP_FRACTION = 0.05
PROMPT_STYLE = "compact"
"""Prompts of the warm start. A run with this policy must use the same style."""

_PIECES = ('{"user_profile": "', '", "rewritten_query": "', '", "history_summary": "', '"}')
"""Fixed texts of an action. Each is one token: 4 tokens instead of about 30, which the CPU generates one by one."""
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_DISTRIBUTED_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def cached_policy(steps: int, seed: int) -> Path:
    """The folder of the small policy. It is made now if the cache does not hold it.

    Several processes may ask at once: one makes the policy, and the others wait.

    Args:
        steps (`int`):
            Steps of supervised fine-tuning.
        seed (`int`):
            Seed of the weights and of the data's order.

    Returns:
        `Path`: a folder that `from_pretrained` loads.

    Raises:
        `SalesRLError`: the warm start failed; the message holds the end of its output.
        `ConfigError`: the cache does not hold it, and can't be written.
    """
    return make_in_subprocess(_policy_folder(steps, seed), "salesrl_trl.demo.policy", steps, seed)


def make_in_subprocess(target: Path, module: str, steps: int, seed: int) -> Path:
    """`cached_policy` for a folder of the cache, and the module that makes it. Returns the folder."""
    if (target / "config.json").is_file():  # it came there whole, so that a cache that can only be read will do
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{target}.lock"):
            if not (target / "config.json").is_file():
                _make_in_subprocess(target, module, steps, seed)
    except OSError as error:
        raise ConfigError(
            f"the small policy can't be kept in {target.parent} ({error.strerror}). Expected a folder with room, and "
            "the right to write. Set the environment variable SALESRL_CACHE_DIR to one, or give `model_name_or_path`."
        ) from error
    return target


def policy_tokenizer(steps: int, seed: int) -> "PreTrainedTokenizerBase":
    """The tokenizer of the small policy. It needs no warm start: without the folder, an equal one is made."""
    from transformers import AutoTokenizer

    folder = _policy_folder(steps, seed)
    return AutoTokenizer.from_pretrained(folder) if (folder / "config.json").is_file() else build_tokenizer()


def _policy_folder(steps: int, seed: int) -> Path:
    return cache_dir() / "policies" / f"seed{seed}-steps{steps}-{_recipe_hash()}"


def _recipe_hash() -> str:
    """A hash of everything that decides the policy: constants and functions of this module, prompt, rows, drafts."""
    digest = hashlib.sha256(repr([(name, value) for name, value in globals().items() if name.isupper()]).encode())
    for function in (make_policy, build_tokenizer, build_model, _demonstrations):
        digest.update(inspect.getsource(function).encode())
    for path in (template_path(PROMPT_STYLE), demo_path("train.jsonl"), demo_path("drafts.jsonl")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _make_in_subprocess(target: Path, module: str, steps: int, seed: int) -> None:
    logger.info(f"warm start: {steps} SFT steps of the small policy (once; kept in {target})")
    # One GPU at most: with several, the Trainer of a single process multiplies the batch by their number.
    inherited = child_environment(with_gpu=True)
    environment = {name: value for name, value in inherited.items() if not _belongs_to_launcher(name)}
    # accelerate sets one thread for each process, and nothing else runs meanwhile
    environment["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    work = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        command = [sys.executable, "-m", module, str(work / "policy")]
        command += ["--steps", str(steps), "--seed", str(seed)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SalesRLError(
                f"the warm start of the small policy failed with exit code {done.returncode}. Expected 0. Run "
                f"`{' '.join(command)}` to see all of its output, or give --model_name_or_path. The output ends:\n"
                f"{done.stderr[-2000:]}"
            )
        (work / "policy").rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _belongs_to_launcher(name: str) -> bool:
    return name in _DISTRIBUTED_VARIABLES or name.startswith(("ACCELERATE_", "TORCHELASTIC_", "DEEPSPEED_", "FSDP_"))


def make_policy(target: Path, steps: int, seed: int) -> None:
    """Build tokenizer and model, warm-start them, and save both to `target`."""
    import torch
    from transformers import set_seed
    from trl import SFTConfig, SFTTrainer

    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        keep_freed_memory()
    set_seed(seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = SFTConfig(
            output_dir=scratch,
            max_steps=steps,
            per_device_train_batch_size=BATCH_SIZE,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="cosine",
            warmup_steps=int(WARMUP_FRACTION * steps),
            logging_steps=25,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=seed,
            bf16=False,
            gradient_checkpointing=False,
            max_length=MAX_POSITIONS,
            use_cpu=on_cpu,
            dataset_num_proc=None,
        )
        rows = _demonstrations(steps * BATCH_SIZE)
        SFTTrainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer).train()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def build_tokenizer() -> "PreTrainedTokenizerBase":
    """A byte-level BPE tokenizer of `VOCAB_SIZE` entries, trained on the demo's conversations and drafts."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    texts = []
    for row, drafts in load_drafts():
        texts.append(row.context)
        texts.extend(value for draft in drafts for value in draft.values())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(_PIECES),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in _PIECES])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=MAX_POSITIONS,
    )


def build_model(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedModel":
    """A Qwen2 of about 1.2 million random weights. Its output head is not tied (see `has_tied_head`)."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=MLP_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def _demonstrations(most: int) -> "Dataset":
    """The drafts as demonstrations, `most` of them if there are more: TRL turns each into tokens."""
    from datasets import Dataset

    rows = (
        {
            "prompt": build_prompt(row, PROMPT_STYLE),
            "completion": [{"role": "assistant", "content": action_text(Action(fields=draft))}],
        }
        for row, drafts in load_drafts()
        for draft in drafts
    )
    return Dataset.from_list([*itertools.islice(rows, most)])


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    make_policy(arguments.target, arguments.steps, arguments.seed)


if __name__ == "__main__":
    _main()
