"""The policy's files in the page cache, before they are asked for: the disk works while Python imports.

Owns the reading. Loads no model: transformers then finds the bytes in memory.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import psutil
from transformers.utils.hub import try_to_load_from_cache

from salesrl_trl.timing import TimingContext

_CHUNK = 16 * 2**20
_READERS = 4
"""Files that are read at once: one stream does not use up a fast disk."""


def weight_files(name_or_path: str, revision: str | None = None) -> list[Path]:
    """The model's files of weights on this machine: in its folder, or in the hub's cache. Empty if there are none."""
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        config = try_to_load_from_cache(name_or_path, "config.json", revision=revision)
        if not isinstance(config, str):
            return []
        folder = Path(config).parent
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))


def begin_read_ahead(name_or_path: str, revision: str | None, timed: TimingContext) -> None:
    """Read the model's files in the background. Other code tells of a wrong name, and of a file that can't be read."""

    def work() -> None:
        with contextlib.suppress(OSError, ValueError), timed:
            read_ahead(weight_files(name_or_path, revision))

    threading.Thread(target=work, name="read ahead", daemon=True).start()


def read_ahead(files: Sequence[Path]) -> int:
    """Read files, so that the page cache holds them. Files that do not fit into free memory are left out.

    Returns:
        `int`: bytes that were read.

    Raises:
        `OSError`: a file can't be read.
    """
    size = sum(file.stat().st_size for file in files)
    if size > psutil.virtual_memory().available:
        return 0
    left, errors = deque(files), list[OSError]()

    def work() -> None:
        with contextlib.suppress(IndexError):  # none left
            while True:
                try:
                    _read(left.popleft())
                except OSError as error:
                    errors.append(error)

    readers = [threading.Thread(target=work, daemon=True) for _ in files[:_READERS]]  # a run may end while they read
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    if errors:
        raise errors[0]
    return size


def _read(file: Path) -> None:
    buffer = bytearray(_CHUNK)
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(buffer):  # without Python's lock
            pass
