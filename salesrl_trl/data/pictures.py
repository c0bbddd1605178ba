"""Finds, validates and measures a row's images. `datasets` decodes them when a row is accessed."""

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from salesrl_trl.errors import DataError
from salesrl_trl.types import Picture, SalesRow

if TYPE_CHECKING:
    from transformers import ProcessorMixin

_EXPECTED = "a list of files that Pillow reads (PNG, JPEG, ...), or of what the `Image` feature of `datasets` holds"


def read_pictures(value: object, folder: Path | None, where: str) -> tuple[Picture, ...]:
    """Read a row's images and check their headers. The value is a path, a Pillow image or `{"path": ..., "bytes":
    ...}`, or a list of them. Relative paths are resolved against `folder`, by default the working directory. Raises
    `DataError` if an image does not exist, is invalid, or exceeds Pillow's pixel limit."""
    if value is None:
        return ()
    values = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    pictures = tuple(_picture(item, folder, where) for item in values if item is not None)
    for number, picture in enumerate(pictures):
        named = picture.path or f"number {number} (counted from 0)"
        try:
            size_of(picture)
        except Exception as error:  # from Pillow
            absent = isinstance(error, FileNotFoundError)
            fault = "does not exist" if absent else f"can't be read ({type(error).__name__})"
            raise DataError(
                f"{where}: the picture {named} {fault}. Expected {_EXPECTED}, with paths relative to the data file."
            ) from None
    return pictures


def _picture(value: object, folder: Path | None, where: str) -> Picture:
    if isinstance(value, Mapping):
        content, value = value.get("bytes"), value.get("path")
        if isinstance(content, bytes):
            return Picture(content=content)
    if isinstance(value, bytes):
        return Picture(content=value)
    if isinstance(value, str | Path) and str(value):
        path = Path(value).expanduser()
        return Picture(path=str(path if folder is None else folder / path))
    if hasattr(value, "save") and hasattr(value, "mode"):  # a Pillow image, without importing Pillow (50 ms)
        content = io.BytesIO()
        value.save(content, "PNG")
        return Picture(content=content.getvalue())
    raise DataError(f"{where}: `images` holds a {type(value).__name__}. Expected {_EXPECTED}.")


def size_of(picture: Picture) -> tuple[int, int]:
    """Height and width in pixels, from the file's header."""
    from PIL import Image  # 50 ms, which rows without images save

    source = picture.path if picture.content is None else io.BytesIO(picture.content)
    with Image.open(source) as image:
        return image.height, image.width


def picture_counter(
    processor: "ProcessorMixin", chat_template_kwargs: Mapping[str, object] | None = None
) -> Callable[[SalesRow], int]:
    """Return a function that counts the tokens a row's images add to its prompt. The count depends on the image size.
    If the processor can't compute it from the size, a blank image of that size is processed."""

    count_tokens = getattr(processor, "_get_num_multimodal_tokens", None)

    @functools.cache
    def count(height: int, width: int) -> int:
        if count_tokens is None:
            return measured(height, width)
        # An image's tokens are surrounded by others, e.g. start and end markers, whose number doesn't depend on size:
        # tokens of the image + (all tokens of a reference image - those that count_tokens reports)
        [tokens] = count_tokens(image_sizes=[[height, width]])["num_image_tokens"]
        [reference_tokens] = count_tokens(image_sizes=[[256, 256]])["num_image_tokens"]
        return int(tokens) + measured(256, 256) - int(reference_tokens)

    @functools.cache
    def measured(height: int, width: int) -> int:
        from PIL import Image

        lengths = []
        for images in ([{"type": "image", "image": Image.new("RGB", (width, height))}], []):
            prompt = [{"role": "user", "content": [*images, {"type": "text", "text": "?"}]}]
            kwargs = chat_template_kwargs or {}
            made = processor.apply_chat_template([prompt], tokenize=True, return_dict=True, **kwargs)
            lengths.append(len(made["input_ids"][0]))
        return lengths[0] - lengths[1]

    def counted(row: SalesRow) -> int:
        return sum(count(*size_of(image)) for image in row.images)

    return counted
