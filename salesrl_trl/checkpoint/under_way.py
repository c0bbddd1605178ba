"""The generation batch under way, in a checkpoint.

Owns its file. A run that stopped inside a generation batch resumes with the completions that it had not trained on.
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
            Rank of the process.
        arrangement (`list[int]`):
            Figures that decide the slices of a generation batch. Only slices of the same arrangement can be used.
        batches (`list[dict]`):
            Slices of the generation batch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"arrangement": arrangement, "batches": batches}, folder / UNDER_WAY_FILE.format(rank=rank))


def load_under_way(folder: Path, rank: int, arrangement: list[int], device: torch.device) -> Batches | None:
    """The slices of `save_under_way`; `None` if there are none, or if their arrangement was another one."""
    path = folder / UNDER_WAY_FILE.format(rank=rank)
    if not path.is_file():
        return None
    state = torch.load(path, map_location=device, weights_only=True)
    return state["batches"] if state["arrangement"] == arrangement else None
