"""Rows of the dataset as the sampler and the reward get them.

Owns the prompts with their pictures, and the numbers by which rows are known again in a checkpoint.
"""

import zlib
from collections.abc import Sequence
from typing import Any

from trl.data_utils import prepare_multimodal_messages

from salesrl_trl.types import Example


def keys_of(inputs: Sequence[Example]) -> list[int]:
    """A number for each row by which it is known again."""
    return [
        example["row"] if isinstance(example.get("row"), int) else zlib.crc32(repr(example["prompt"]).encode())
        for example in inputs
    ]


def prompts_of(inputs: Sequence[Example]) -> list[object]:
    """The prompts, with their pictures where TRL puts them: before the first user message."""
    pictures = [_pictures(example) for example in inputs]
    prompts = [example.get("prompt") for example in inputs]  # an environment may have them
    if not any(pictures):
        return prompts
    return [prepare_multimodal_messages(prompt, own) for prompt, own in zip(prompts, pictures, strict=True)]


def _pictures(example: Example) -> list[Any] | None:
    """The pictures of a row: TRL takes a column `images`, or one picture in a column `image`."""
    if "images" in example:
        return example["images"]  # type: ignore[no-any-return]
    return None if example.get("image") is None else [example["image"]]
