"""What a checkpoint holds beside transformers' own files.

Owns the generation batch under way: where a run stops inside one, it goes on with the very completions that it has not
trained on yet.
"""

from pathlib import Path
from typing import Any

import torch

from salesrl_trl.names import UNDER_WAY_FILE

Batches = list[dict[str, Any]]
"""The slices of a generation batch, as TRL keeps them."""


def save_under_way(folder: Path, rank: int, arrangement: list[int], batches: Batches) -> None:
    """Save one process's generation batch.

    Args:
        folder (`Path`):
            The checkpoint.
        rank (`int`):
            Of the process.
        arrangement (`list[int]`):
            What cuts a generation batch into slices: those of another one can't be gone on with.
        batches (`list[dict]`):
            Its slices.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"arrangement": arrangement, "batches": batches}, folder / UNDER_WAY_FILE.format(rank=rank))


def load_under_way(folder: Path, rank: int, arrangement: list[int], device: torch.device) -> Batches | None:
    """The slices that `save_under_way` has saved; `None` without any, or where they were cut otherwise."""
    path = folder / UNDER_WAY_FILE.format(rank=rank)
    if not path.is_file():
        return None
    state = torch.load(path, map_location=device, weights_only=True)
    return state["batches"] if state["arrangement"] == arrangement else None
