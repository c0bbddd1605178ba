"""The faults that users meet: what each looks like, its cause, and what to do.

Owns what a fault is (`Fault`). `catalogue.toml` holds the faults, and is read when this module is imported: where
files are used up, it is too late. `last_words` recognises a fault by them, and `scripts/make_troubleshooting.py` makes
their page. The first fault with a fitting sign counts. Standard library only.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

PAGE = "docs/TROUBLESHOOTING.md"  # the page of all faults


@dataclass(frozen=True)
class Sign:
    """How an error is recognised: every field given must fit. `catalogue.toml` says what each is compared with."""

    text: str = ""
    kind: str = ""
    where: str = ""
    status: int = 0


@dataclass(frozen=True)
class Fault:
    """A fault, and what to do, the cheapest first. `follows`: whether another process's error is the cause."""

    title: str
    cause: str
    signs: tuple[Sign, ...]
    remedies: tuple[str, ...]
    follows: bool = False

    @property
    def anchor(self) -> str:
        """The heading's name in a link, as GitHub makes it."""
        return "".join(letter for letter in self.title.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")


@dataclass(frozen=True)
class Words:
    """The last words of one process."""

    text: str
    code: int  # exit code
    follows: bool = False  # whether the error follows from that of another process, which then is the one to report


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
CRASHES: dict[str, str] = _TABLE["crashes"]
FAULTS = tuple(
    Fault(**fault | {"signs": tuple(Sign(**sign) for sign in fault["signs"]), "remedies": tuple(fault["remedies"])})
    for fault in _TABLE["fault"]
)
"""In the order in which they are tried."""
