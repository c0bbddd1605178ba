"""The driver and the GPUs of this machine. Doesn't import torch."""

import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from salesrl_trl.errors import ConfigError

if TYPE_CHECKING:
    import torch

_GPU_FIELDS = ("index", "name", "driver_version", "memory.total", "memory.used")


def gpus() -> list[dict[str, str]]:
    """The GPUs listed by nvidia-smi; empty without a GPU or an answer."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    try:  # the driver may hang after a GPU fault
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(_GPU_FIELDS, line.split(", "), strict=False)) for line in text.splitlines()]


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    gib: float
    used_gib: float = 0.0  # memory in use now, by all processes


def named_card(text: str) -> Card:
    """A GPU by its memory: `"75gib"`, or `"80gb"` for 80e9 bytes, the minimum of GPUs with this name."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(gb|gib)", text.strip().lower())
    if size is None:
        raise ConfigError(f"`card` is {text!r}. Expected a size such as 24gb, 80gb or 131.5gib.")
    return Card(text, float(size[1]) * (1e9 / 2**30 if size[2] == "gb" else 1.0))


def card_here(device: "torch.device") -> Card | None:
    if device.type != "cuda":
        return None
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return Card(torch.cuda.get_device_name(device), total / 2**30, (total - free) / 2**30)
