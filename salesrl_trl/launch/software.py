"""What this process runs on: other packages' versions, the driver, and the card with its users.

`ground.own_code` has the package itself. Needs neither torch nor a GPU, and imports none of the packages.
"""

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
    """The GPUs that the driver shows, by nvidia-smi; empty without one."""
    rows = ask_driver(f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader")
    return [dict(zip(_GPU_FIELDS, row, strict=False)) for row in rows]


def ask_driver(*arguments: str) -> list[list[str]]:
    """The fields of each row that nvidia-smi prints. No rows without a driver, or if it does not answer."""
    try:
        command = ["nvidia-smi", *arguments]
        text = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[field.strip() for field in line.split(",")] for line in text.splitlines()]


@dataclass(frozen=True, slots=True)
class Card:
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
    return Card(text, float(size[1]) * (1e9 / 2**30 if size[2] == "gb" else 1.0))


def card_here(device: "torch.device") -> Card | None:
    if device.type != "cuda":
        return None
    import torch

    properties = torch.cuda.get_device_properties(device)
    return Card(properties.name, properties.total_memory / 2**30, f"GPU-{properties.uuid}")
