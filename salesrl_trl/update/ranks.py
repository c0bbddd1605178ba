"""Decisions that all ranks make together."""

import torch
from accelerate import PartialState
from accelerate.utils import gather


def on_any_rank(condition: bool, device: torch.device) -> bool:
    """A collective."""
    return bool(highest(condition, device))


def highest(number: int, device: torch.device) -> int:
    """The highest number of all ranks; a collective."""
    if PartialState().num_processes == 1:
        return number
    return int(gather(torch.tensor([number], device=device)).max())
