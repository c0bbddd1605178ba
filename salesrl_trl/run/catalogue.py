"""The faults that users meet: what each looks like, its cause, and what to do.

Owns what a fault is (`Fault`) and its page. `catalogue.toml` holds the faults, and is read when this module is
imported: where files are used up, it is too late. `last_words` recognises a fault by them, and
`python -m salesrl_trl.run.catalogue` prints docs/TROUBLESHOOTING.md. The first fault with a fitting sign counts.
Standard library only.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PAGE = "docs/TROUBLESHOOTING.md"  # the page of all faults, which `page` makes


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


def page(faults: Iterable[Fault]) -> str:
    """The text of `PAGE`, by title."""
    ordered = sorted(faults, key=lambda fault: fault.title)
    parts = [
        "# Troubleshooting",
        "A run that fails ends with its last words: the error, its cause, and what to do, in this order. They are the "
        "last lines of the console, and stand in `OUTPUT_DIR/run.log`. This page holds all that are known. It is made "
        f"by `python -m salesrl_trl.run.catalogue > {PAGE}`, from the table by which a run recognises them.",
        "For a run that hangs: the last `[Heartbeat]` line names the phase ([TIMING.md](TIMING.md)).",
        "\n".join(f"- [{fault.title}](#{fault.anchor})" for fault in ordered),
    ]
    for fault in ordered:
        steps = "\n".join(f"{number}. {step}" for number, step in enumerate(fault.remedies, 1))
        parts += [f"## {fault.title}", fault.cause, f"Recognised by: {'; '.join(map(_shown, fault.signs))}.", steps]
    return "\n\n".join(parts) + "\n"


def _shown(sign: Sign) -> str:
    parts = {"error": sign.kind, "message": sign.text, "raised in": sign.where, "signal": sign.status}
    return ", ".join(f"{name} `{value}`" for name, value in parts.items() if value)


@dataclass(frozen=True)
class Words:
    """The last words of one process."""

    text: str
    code: int  # exit code
    follows: bool = False  # whether the error follows from that of another process, which then is the one to report


def _read() -> tuple[Fault, ...]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for fault in table["fault"]:
        fault |= {"signs": tuple(Sign(**sign) for sign in fault["signs"]), "remedies": tuple(fault["remedies"])}
    return tuple(Fault(**fault) for fault in table["fault"])


FAULTS = _read()
"""In the order in which they are tried."""


if __name__ == "__main__":
    print(page(FAULTS), end="")
