"""What a fault is: its signs, its cause, its remedies, and its section in docs/TROUBLESHOOTING.md.

Refuses to hold any fault: `catalogue` does.
"""

from collections.abc import Iterable
from dataclasses import dataclass

PAGE = "docs/TROUBLESHOOTING.md"
"""Made by `page`."""


@dataclass(frozen=True)
class Sign:
    """What an error must be: all that is given here. Without `kind` and `where`, a run's log is searched too."""

    text: str = ""
    """Regular expression for the error's message."""
    kind: str = ""
    """Class of the error or of a base: its name, perhaps with modules before it."""
    where: str = ""
    """Regular expression for `module.function` of a frame that the error passed: the phase of the run."""
    status: int = 0
    """Number of the signal that ended the process; with it `text` is searched in the log alone."""


@dataclass(frozen=True)
class Fault:
    """A fault, and what to do about it."""

    title: str
    cause: str
    signs: tuple[Sign, ...]
    remedies: tuple[str, ...]
    """The cheapest first."""
    follows: bool = False
    """Whether the error of another process is the cause."""

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
    given = {"error": sign.kind, "message": sign.text, "raised in": sign.where, "signal": sign.status}
    return ", ".join(f"{name} `{value}`" for name, value in given.items() if value)


@dataclass(frozen=True)
class Words:
    """The last words of one process."""

    text: str
    code: int
    """Exit code."""
    follows: bool = False
    """Whether the error follows from that of another process, which then is the one to report."""
