"""The pictures of a row: found, checked and measured. `datasets` decodes them when a row is asked for."""

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
    """The pictures of a row, after a look at the head of each. The value is a path, an object of Pillow or
    `{"path": ..., "bytes": ...}`, or a list of them. Relative paths start in `folder`, or in the working directory.
    Raises `DataError` if a picture is missing, is none, or has more pixels than Pillow reads."""
    if value is None:
        return ()
    values = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    pictures = tuple(_picture(item, folder, where) for item in values if item is not None)
    for number, picture in enumerate(pictures):
        named = picture.path or f"number {number} (counted from 0)"
        try:
            size_of(picture)
        except Exception as error:  # of Pillow
            absent = isinstance(error, FileNotFoundError)
            fault = "is not there" if absent else f"can't be read ({type(error).__name__})"
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
    if hasattr(value, "save") and hasattr(value, "mode"):  # an object of Pillow, whose import costs 50 ms
        content = io.BytesIO()
        value.save(content, "PNG")
        return Picture(content=content.getvalue())
    raise DataError(f"{where}: `images` holds a {type(value).__name__}. Expected {_EXPECTED}.")


def size_of(picture: Picture) -> tuple[int, int]:
    """Height and width in pixels, from the file's head."""
    from PIL import Image  # takes 50 ms, which rows without pictures do without

    source = picture.path if picture.content is None else io.BytesIO(picture.content)
    with Image.open(source) as image:
        return image.height, image.width


def picture_counter(
    processor: "ProcessorMixin", chat_template_kwargs: Mapping[str, object] | None = None
) -> Callable[[SalesRow], int]:
    """A function that counts the tokens which the pictures of a row add to its prompt. The count of a picture follows
    from its size. Where the processor can't say it without pixels, an empty picture of that size is processed."""

    count_tokens = getattr(processor, "_get_num_multimodal_tokens", None)

    @functools.cache
    def count(height: int, width: int) -> int:
        if count_tokens is None:
            return measured(height, width)
        # Around those of a picture are tokens such as marks of its beginning and end, as many for every size. So:
        # tokens of the picture + (all tokens of a reference picture - those that count_tokens knows of)
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
