"""The pictures of a row: found, checked and measured.

Owns the forms in which a dataset holds pictures, and the tokens that a policy spends on them. Refuses to decode them:
`datasets` does when a row is asked for. `processor` makes pixels of them.
"""

import errno
import functools
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salesrl_trl.errors import ConfigError, DataError
from salesrl_trl.types import Picture, SalesRow

if TYPE_CHECKING:
    from transformers import ProcessorMixin

MOST_PIXELS = 89_478_485
"""Of one picture: those from which Pillow warns of a decompression bomb, a quarter of a GiB unpacked."""
_EXPECTED = "a list of files that Pillow reads (PNG, JPEG, ...), or of what the `Image` feature of `datasets` holds"


def read_pictures(value: object, folder: Path | None, where: str) -> tuple[Picture, ...]:
    """The pictures of a row, each of which is there and begins as a picture does.

    `value`: Paths, objects of Pillow, or `{"path": ..., "bytes": ...}`: a list of them, or one. `folder`: where
    relative paths start. Defaults to the working directory. `where`: the row's place, for messages.

    Raises:
        `DataError`: a picture is missing, is none, or has more pixels than any policy reads.
    """
    if value is None:
        return ()
    given = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    pictures = tuple(_picture(each, folder, where) for each in given if each is not None)
    for number, picture in enumerate(pictures):
        named = picture.path or f"number {number} (counted from 0)"
        try:
            size_of(picture)
        except OSError as error:
            absent = isinstance(error, FileNotFoundError)
            large = error.strerror if error.errno == errno.EFBIG else None
            raise DataError(
                f"{where}: the picture {named} "
                f"{'is not there' if absent else f'has {large}' if large else 'can not be read as a picture'}. "
                f"Expected {_EXPECTED}"
                + (", with paths relative to the data file or to `image_folder`. Correct the path." if absent else ".")
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
    """Height and width in pixels, from the file's head. Raises `OSError` if it is absent, no picture, or has too many
    pixels."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            "rows have pictures, and Pillow is not installed. Expected it: `pip install pillow`. Install it, or leave "
            "the pictures out (`columns: {images: {value: null}}`)."
        ) from error
    source: Any = picture.path if picture.content is None else io.BytesIO(picture.content)
    try:
        with Image.open(source) as image:
            width, height = image.size
    except Image.DecompressionBombError:
        width, height = MOST_PIXELS, 2
    if width * height > MOST_PIXELS:
        raise OSError(errno.EFBIG, f"more than {MOST_PIXELS:,} pixels")
    return height, width


def picture_counter(
    processor: "ProcessorMixin", chat_template_kwargs: Mapping[str, object] | None = None
) -> Callable[[SalesRow], int]:
    """A function that counts the tokens which the pictures of a row add to its prompt.

    The count of a picture follows from its size. Where the processor can't say it without pixels, an empty picture of
    that size is processed.
    """

    @functools.cache
    def count(height: int, width: int) -> int:
        tell = getattr(processor, "_get_num_multimodal_tokens", None)
        if tell is None:
            return _measured(height, width)
        [tokens] = tell(image_sizes=[[height, width]])["num_image_tokens"]
        return int(tokens) + overhead(tell)

    @functools.cache
    def overhead(tell: Callable[..., Mapping[str, Sequence[int]]]) -> int:
        """Tokens around those of a picture, such as marks of its beginning and end."""
        [tokens] = tell(image_sizes=[[256, 256]])["num_image_tokens"]
        return _measured(256, 256) - int(tokens)

    @functools.cache
    def _measured(height: int, width: int) -> int:
        from PIL import Image

        with_picture, without = (
            len(
                processor.apply_chat_template(
                    [[{"role": "user", "content": [*images, {"type": "text", "text": "?"}]}]],
                    tokenize=True,
                    return_dict=True,
                    **(chat_template_kwargs or {}),
                )["input_ids"][0]
            )
            for images in ([{"type": "image", "image": Image.new("RGB", (width, height))}], [])
        )
        return with_picture - without

    return lambda row: sum(count(*size_of(image)) for image in row.images)
