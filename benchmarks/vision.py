"""Does a policy learn to read pictures? The vision run of the debug recipe, and what its policy takes from them.

    python -m benchmarks.vision                      # the debug recipe with --preset vision, seeds 1
    python -m benchmarks.vision --seeds 1 2 3 --use_vllm true
    python -m benchmarks.vision --shape 3b           # three steps of Qwen2.5-VL's 3B shape with random weights

The policy of the first two is taught before, if `--policy` is not there. Before and after each run the policy answers
the held-out rows greedily: with their pictures, with empty ones, and with those of other rows. Printed is the share
whose query names the course that the true picture marks. By chance it is 1 in 12.
"""

import argparse
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from trl.data_utils import prepare_multimodal_messages

from salesrl_trl.data.files import DEMO_PICTURES_FOLDER, FILES, Record, read_file
from salesrl_trl.data.rows import parse_row
from salesrl_trl.judged.parsing import parse_action
from salesrl_trl.launch.data.processor import load_processor
from salesrl_trl.launch.data.prompts import build_prompt
from salesrl_trl.types import Action

sys.path.append("scripts")  # a benchmark starts in the folder of the checkout
vision = importlib.import_module("make_vision_policy")

BATCH_ROWS = 40
NEW_TOKENS = 64
SHAPES = {
    "3b": (
        {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
         "num_key_value_heads": 2, "mrope_section": [16, 24, 24]},
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
         "fullatt_block_indexes": [7, 15, 23, 31]},
    ),
}  # fmt: skip
"""Qwen2.5-VL's published shapes: of the text model, and of the vision tower."""


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--shape", choices=SHAPES, help="three steps of a larger model with random weights, with vLLM")
    parser.add_argument("--policy", type=Path, default=Path("runs/vision_policy"), help="made if it is not there")
    parser.add_argument("--steps", type=int, default=vision.STEPS, help="of teaching")
    parser.add_argument("--out", type=Path, default=Path("runs/vision"))
    arguments, further = parser.parse_known_args()
    if arguments.shape:
        _train_shape(arguments.shape, arguments.out / arguments.shape, further)
        return
    if not arguments.policy.is_dir():
        vision.make_policy(arguments.policy, arguments.steps, seed=0)
    print(f"taught: names the marked course: {_shares(str(arguments.policy))}", flush=True)
    for seed in arguments.seeds:
        folder = arguments.out / f"seed{seed}"
        settings = {"model_name_or_path": arguments.policy, "seed": seed, "output_dir": folder}
        _launch("--preset", "vision", *_arguments(settings), *further)
        print(f"seed {seed}: names the marked course: {_shares(str(folder))}", flush=True)


def _launch(*settings: str) -> None:
    """The debug recipe. Its lines are shown as they come."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/debug.yaml"]
    subprocess.run([*command, "recipes/debug.py", *settings], check=True)


def _arguments(settings: Mapping[str, object]) -> list[str]:
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))]


def _shares(policy: str) -> str:
    records = [each.record for each in read_file(DEMO_PICTURES_FOLDER / FILES["heldout"])]
    pictures = [Image.open(DEMO_PICTURES_FOLDER / record["images"][0]).convert("RGB") for record in records]
    empty = [Image.new("RGB", each.size, "white") for each in pictures]
    swapped = [*pictures[1:], pictures[0]]
    model = AutoModelForImageTextToText.from_pretrained(
        policy, device_map="auto" if torch.cuda.is_available() else None
    )
    shown = {"its picture": pictures, "an empty one": empty, "another row's": swapped}
    return ", ".join(
        f"{_named(model.eval(), policy, records, images):.0%} with {name}" for name, images in shown.items()
    )


@torch.no_grad()
def _named(model: Any, policy: str, records: Sequence[Record], pictures: Sequence[Image.Image]) -> float:
    """Share of the records whose greedy query names the marked course."""
    processor, named = load_processor(policy), 0
    for first in range(0, len(records), BATCH_ROWS):
        part = records[first : first + BATCH_ROWS]
        rows = [parse_row({**each, "images": None}, 0, [each["branch"]], "the demo") for each in part]
        prompts = [
            prepare_multimodal_messages(build_prompt(row, vision.PROMPT_STYLE), [picture])
            for row, picture in zip(rows, pictures[first : first + BATCH_ROWS], strict=True)
        ]
        inputs = processor.apply_chat_template(
            prompts,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        ).to(model.device)
        made = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[:, inputs["input_ids"].size(1) :]
        actions = [parse_action(text) for text in processor.batch_decode(made, skip_special_tokens=True)]
        named += sum(
            isinstance(action, Action) and record["course_name"].lower() in action.query.lower()
            for action, record in zip(actions, part, strict=True)
        )
    return named / len(records)


def _train_shape(name: str, folder: Path, further: Sequence[str]) -> None:
    """Three steps with vLLM. The run itself compares log-probs, and ends if vLLM has other weights."""
    text, tower = SHAPES[name]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": text["mrope_section"]}
    processor = vision.build_processor()
    shape = {key: value for key, value in text.items() if key != "mrope_section"}
    config = vision.build_config(
        processor.tokenizer, {**shape, "rope_parameters": rope}, {**tower, "initializer_range": 0.02}
    )
    with tempfile.TemporaryDirectory() as policy, torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
        size = sum(each.numel() for each in model.parameters())
        print(f"a Qwen2.5-VL of the shape {name}, random weights: {size / 1e9:.2f} B parameters", flush=True)
        model.save_pretrained(policy)
        processor.save_pretrained(policy)
        del model
        settings = {
            "model_name_or_path": policy, "output_dir": folder, "use_vllm": True, "max_steps": 3,
            "learning_rate": 1e-5, "warmup_steps": 0, "bf16": True, "held_out_eval": False, "quick_eval_steps": 0,
            "per_device_train_batch_size": 16, "report_to": "none", "save_strategy": "no",
        }  # fmt: skip
        _launch("--preset", "vision", *_arguments(settings), *further)


if __name__ == "__main__":
    main()
