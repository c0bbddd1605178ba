"""Text files of a user: read within a limit, and the words about one that can't be read."""

import errno
from pathlib import Path

MOST_BYTES = 16 * 2**20
"""Largest file that a person writes: a template, a rubric, a recipe."""


def read_small(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of a UTF-8 file, with or without a byte order mark.

    Raises:
        `OSError`: it can't be read, or is larger. No more than the limit is read, of a device without end either.
        `UnicodeDecodeError`: it is not UTF-8.
    """
    content = bytearray()
    with path.open("rb") as file:
        while len(content) <= most_bytes and (part := file.read(2**20)):
            content += part
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes / 2**20:g} MiB")
    return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def unreadable(error: OSError | UnicodeDecodeError) -> str:
    """The error in words, such as `"line 3, byte 17 (0xe9) is not UTF-8: ..."`."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    before = error.object[: error.start]
    line, byte = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
    value = error.object[error.start]
    return f"line {line}, byte {byte} (0x{value:02x}) is not UTF-8: is it Latin-1 or GBK? Save the file as UTF-8"
