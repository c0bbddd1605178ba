"""The generation batch under way, in a checkpoint.

Owns the file of this batch. A run that stopped inside a generation batch resumes with the completions that it had not
trained on.
"""

from pathlib import Path

import torch
from accelerate.logging import get_logger

from salesrl_trl.names import UNDER_WAY_FILE
from salesrl_trl.update.ranks import on_any_rank

logger = get_logger(__name__)

Batches = list[dict[str, object]]
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


def load_on_all_ranks(folder: Path, rank: int, arrangement: list[int], device: torch.device) -> Batches | None:
    """`load_under_way` on all ranks. `None` on all of them, with a warning, if any rank has nothing to load.

    A collective. Without a batch TRL generates one, which is a collective too, so all ranks must do the same.
    """
    batches = load_under_way(folder, rank, arrangement, device)
    if not on_any_rank(batches is None, device):
        return batches
    logger.warning(
        f"{folder} lies inside a generation batch. It does not hold the completions of this batch, or holds them for "
        "another number of processes or other batch sizes: they are generated anew, from the same prompts"
    )
    return None
