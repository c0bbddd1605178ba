"""The policy's files in the page cache, before they are asked for: the disk works while Python imports.

Called by `train` and `preflight.warming`. Loads no model: transformers then finds the bytes in memory.
"""

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil
from transformers.utils.hub import try_to_load_from_cache

from salesrl_trl.timing import TimingContext

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
    """Read files, so that the page cache holds them, unless they are more than free memory. Returns their bytes, or 0.

    Raises `OSError` if a file can't be read.
    """
    size = sum(file.stat().st_size for file in files)
    if size > psutil.virtual_memory().available:
        return 0
    errors = list[OSError]()

    def read(part: Sequence[Path]) -> None:
        buffer = bytearray(16 * 2**20)
        try:
            for file in part:
                with file.open("rb", buffering=0) as opened:
                    while opened.readinto(buffer):  # without Python's lock
                        pass
        except OSError as error:
            errors.append(error)

    parts = [files[first::_READERS] for first in range(_READERS)]
    readers = [threading.Thread(target=read, args=[part], daemon=True) for part in parts]  # a run may end meanwhile
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    if errors:
        raise errors[0]
    return size
