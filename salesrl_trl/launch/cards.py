"""The card that a run trains on: its size, and who uses it now, by NVIDIA's driver."""

import re
from dataclasses import dataclass

import torch

from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.software import ask_driver
from salesrl_trl.telemetry.device import GIB


@dataclass(frozen=True, slots=True)
class Card:
    """A card to train on."""

    name: str
    gib: float
    uuid: str | None = None  # the driver's name of it; `None` if it is not in this machine

    def used_gib(self) -> float | None:
        """Memory in use now, by all processes. `None` if the driver does not say."""
        return next((float(mib) / 1024 for (mib,) in self._rows("--query-gpu=memory.used")), None)

    def users(self) -> str:
        """The processes that use it now: `"python (4711) 12.5 GiB"`. Empty if none is known, as in a container."""
        rows = self._rows("--query-compute-apps=used_memory,pid,process_name")
        return ", ".join(f"{', '.join(name)} ({pid}) {float(mib) / 1024:.1f} GiB" for mib, pid, *name in rows)

    def _rows(self, query: str) -> list[list[str]]:
        """The rows whose first field, the memory in MiB, the driver says."""
        if self.uuid is None:
            return []
        rows = ask_driver(f"--id={self.uuid}", query, "--format=csv,noheader,nounits")
        return [row for row in rows if row[0].replace(".", "").isdigit()]  # else "[N/A]"


def named_card(text: str) -> Card:
    """A card by its size: `"75gib"`, or `"80gb"` with 80e9 bytes, the least of the cards with this name."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(gb|gib)", text.strip().lower())
    if size is None:
        raise ConfigError(f"`card` is {text!r}. Expected a size, such as 24gb, 80gb or 131.5gib. Correct it.")
    return Card(text, float(size[1]) * (1e9 / GIB if size[2] == "gb" else 1.0))


def card_here(device: torch.device) -> Card | None:
    """The card of this process; `None` on a CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return Card(properties.name, properties.total_memory / GIB, f"GPU-{properties.uuid}")
