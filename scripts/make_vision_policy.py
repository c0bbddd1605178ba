#!/usr/bin/env python3
"""A small policy that reads pictures: a Qwen2.5-VL model and its processor. It needs no hub.

    .venv/bin/python scripts/make_vision_policy.py [FOLDER]

Its text part begins with the weights of the built-in small policy. First it is taught to name the marked course of a
picture, then it imitates the draft actions of `demo_pictures`, some of which are of careless annotators. It writes the
rows of `dataset: demo_pictures` too.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from demo_pictures import write_dataset  # beside this file
from imitation import imitate

from salesrl_trl.data.files import DEMO_PICTURES_FOLDER, FILES, Record, read_lines
from salesrl_trl.data.rows import parse_row
from salesrl_trl.demo.packaged import PACKAGED, PROMPT_STYLE, VISION_POLICY, packaged_tokenizer
from salesrl_trl.launch.data.processor import NoVideos, videos_left_out
from salesrl_trl.launch.data.prompts import build_prompt
from salesrl_trl.launch.data.sources import prompt_dataset
from salesrl_trl.types import Prompt, SalesRow

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

VISION_SIZE = 64
VISION_LAYERS = 2
VISION_HEADS = 2  # each head has size 32, the smallest that vLLM's CPU attention accepts
VISION_WEIGHTS = 0.06
"""Standard deviation of the tower's weights at the start. With the usual 0.02 so narrow a tower learns nothing."""
PATCH = 14
MERGE = 2  # a token of a picture stands for 28 x 28 pixels: `MERGE` x `MERGE` patches
MOST_TOKENS = 64  # most tokens of a picture. A larger picture is made smaller.
STEPS = 240
READING_SHARE = 0.5  # share of the steps in which it names courses. These steps are short.
BATCH_SIZE = 32
LEARNING_RATE = 2e-3
WARMUP_FRACTION = 0.1

Turns = list[dict[str, str]]
_SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "max_position_embeddings")  # fmt: skip
_IMAGE, _VIDEO, _START, _END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    f"{{% if part['type'] == 'image' %}}{_START}{_IMAGE}{_END}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_processor() -> "ProcessorMixin":
    """Qwen2.5-VL's processor, with the demo's tokenizer and tokens for pictures."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessorPil, Qwen2VLVideoProcessor
    from transformers.utils import is_torchvision_available

    tokenizer = packaged_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [_IMAGE, _VIDEO, _START, _END]})
    tokenizer.chat_template = _CHAT_TEMPLATE
    pixels = (PATCH * MERGE) ** 2
    sizes = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2}
    limits = {"shortest_edge": pixels, "longest_edge": MOST_TOKENS * pixels}
    images = Qwen2VLImageProcessorPil(**sizes, size=limits)
    if is_torchvision_available():
        videos = Qwen2VLVideoProcessor(**sizes, size=limits)
    else:
        videos = NoVideos({**sizes, "size": limits, "video_processor_type": "Qwen2VLVideoProcessor"})
    with videos_left_out():
        return Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=_CHAT_TEMPLATE)


def build_model(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedModel":
    """A Qwen2.5-VL of about 1.4 million random weights."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration(build_config(tokenizer))


def build_config(
    tokenizer: "PreTrainedTokenizerBase",
    text: Mapping[str, object] | None = None,
    tower: Mapping[str, object] | None = None,
) -> "PretrainedConfig":
    """The configuration of a Qwen2.5-VL with the tokens of `build_processor`. It is that of the small policy, except
    for what `text` and `tower` say of its two parts."""
    from transformers import AutoConfig, Qwen2_5_VLConfig

    image, video, start, end = tokenizer.convert_tokens_to_ids([_IMAGE, _VIDEO, _START, _END])
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    packaged = AutoConfig.from_pretrained(PACKAGED)  # its tokenizer leaves rows for new tokens
    half = packaged.hidden_size // packaged.num_attention_heads // 2
    small_text = {
        **{name: getattr(packaged, name) for name in _SHAPE},
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [half // 4, half * 3 // 8, half * 3 // 8],  # time, height, width
        },
        "tie_word_embeddings": False,
        **ends,
    }
    small_tower = {
        "depth": VISION_LAYERS,
        "hidden_size": VISION_SIZE,
        "intermediate_size": 2 * VISION_SIZE,
        "num_heads": VISION_HEADS,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": packaged.hidden_size,
        "window_size": 8 * PATCH,
        "fullatt_block_indexes": [VISION_LAYERS - 1],
        "initializer_range": VISION_WEIGHTS,
    }
    return Qwen2_5_VLConfig(
        text_config={**small_text, **(text or {})},
        vision_config={**small_tower, **(tower or {})},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
        **ends,
    )


def take_text_weights(model: "PreTrainedModel") -> None:
    """Give the text part the weights of the built-in small policy, which reads no pictures."""
    import torch
    from transformers import AutoModelForCausalLM

    own = model.state_dict()
    with torch.no_grad():
        for name, weight in AutoModelForCausalLM.from_pretrained(PACKAGED).state_dict().items():
            own[re.sub(r"^model\.", "model.language_model.", name)].copy_(weight)


def make_policy(target: Path, steps: int, seed: int) -> None:
    from transformers import set_seed

    set_seed(seed)
    write_dataset(DEMO_PICTURES_FOLDER)
    processor = build_processor()
    model = build_model(processor.tokenizer)
    take_text_weights(model)
    reading = round(READING_SHARE * steps)
    for count, rows in ((reading, readings()), (steps - reading, demonstrations())):
        imitate(
            model,
            processor,
            rows,
            steps=count,
            warmup=WARMUP_FRACTION,
            learning_rate=LEARNING_RATE,
            per_device_train_batch_size=BATCH_SIZE,
            max_length=None,
            seed=seed,
        )
    model.save_pretrained(target)
    processor.save_pretrained(target)


def readings() -> "Dataset":
    """Demonstrations that name the marked course, of each training picture. There is no other text in them."""
    rows, records = zip(*_training_rows(), strict=True)
    answers = [[{"role": "assistant", "content": record["course_name"]}] for record in records]
    return _with_answers([[{"role": "user", "content": ""}] for _ in rows], rows, answers)


def demonstrations() -> "Dataset":
    pairs = [(row, draft) for row, record in _training_rows() for draft in record["draft_actions"]]
    answers = [[{"role": "assistant", "content": json.dumps(draft, ensure_ascii=False)}] for _, draft in pairs]
    return _with_answers([build_prompt(row, PROMPT_STYLE) for row, _ in pairs], [row for row, _ in pairs], answers)


def _with_answers(prompts: Sequence[Prompt], rows: Sequence[SalesRow], answers: list[Turns]) -> "Dataset":
    made = prompt_dataset(prompts, rows)
    return made.remove_columns(["row", "branch", "id"]).add_column("completion", answers)


def _training_rows() -> Iterator[tuple[SalesRow, Record]]:
    for position, (record, _) in enumerate(read_lines(DEMO_PICTURES_FOLDER / FILES["train"])):
        yield parse_row(record, position, [record["branch"]], "the demo", folder=DEMO_PICTURES_FOLDER), record


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, nargs="?", default=VISION_POLICY)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_policy(arguments.target, arguments.steps, arguments.seed)


if __name__ == "__main__":
    _main()
