"""What this process runs on: other packages' versions, the driver, and the card. Imports none of the packages."""

import importlib.metadata
import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.own_code import PACKAGE
from salesrl_trl.ground.process import installed

if TYPE_CHECKING:
    import torch

_TOOLS = ("test", "plots")  # extras that no run needs
_DRIVER_S = 20.0  # most seconds that the driver may take to answer. It may hang after a fault of a card.
_GPU_FIELDS = ("index", "name", "driver_version", "memory.total", "memory.used")


@dataclass(frozen=True)
class Package:
    name: str
    wanted: str  # range of versions: ">=1.16.0,<1.17"
    installed: str | None
    extra: str  # the extra that asks for it; empty for a package that every run needs

    @property
    def is_met(self) -> bool:
        """Whether a version of the range is installed. A package of an extra may be absent."""
        if self.installed is None:
            return bool(self.extra)
        return Requirement(f"{self.name}{self.wanted}").specifier.contains(self.installed, prereleases=True)


def packages() -> list[Package]:
    """The packages that the metadata of this one asks for, without tools for tests and pictures."""
    try:
        texts = importlib.metadata.requires(PACKAGE.name) or []
    except importlib.metadata.PackageNotFoundError:  # it is on PYTHONPATH alone
        texts = []
    named = dict[str, Package]()
    for text in texts:
        requirement, extra_of = Requirement(text), re.search(r"extra == ['\"]([\w-]+)", text)
        extra, name = extra_of[1] if extra_of else "", requirement.name
        if extra not in _TOOLS and name not in named:  # two extras may ask for one package
            named[name] = Package(name, str(requirement.specifier), installed(name), extra)
    return [*named.values()]


def gpus() -> list[dict[str, str]]:
    """The GPUs that the driver shows, by nvidia-smi; empty without one, or if it does not answer."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(_GPU_FIELDS, line.split(", "), strict=False)) for line in text.splitlines()]


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    gib: float
    used_gib: float = 0.0  # memory in use now, by all processes


def named_card(text: str) -> Card:
    """A card by its size: `"75gib"`, or `"80gb"` with 80e9 bytes, the least of the cards with this name."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(gb|gib)", text.strip().lower())
    if size is None:
        raise ConfigError(f"`card` is {text!r}. Expected a size, such as 24gb, 80gb or 131.5gib. Correct it.")
    return Card(text, float(size[1]) * (1e9 / 2**30 if size[2] == "gb" else 1.0))


def card_here(device: "torch.device") -> Card | None:
    if device.type != "cuda":
        return None
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return Card(torch.cuda.get_device_name(device), total / 2**30, (total - free) / 2**30)
