"""The last words of a failed run: which fault of the catalogue it is, and what to do about it.

Owns how a fault is recognised, in a chain of exceptions or in the log of a run that a signal ended. `catalogue.toml`
has the faults, of which the first with a fitting sign counts. It is read at the import: where files are used up, it is
too late. Standard library only: the process that waits for a launch reads it too.
"""

import os
import re
import signal
import tomllib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from salesrl_trl.errors import ConfigErrors, SalesRLError

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


_TABLE = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))
CRASHES: dict[str, str] = _TABLE["crashes"]
FAULTS = tuple(
    Fault(**fault | {"signs": tuple(Sign(**sign) for sign in fault["signs"]), "remedies": tuple(fault["remedies"])})
    for fault in _TABLE["fault"]
)
"""In the order in which they are tried."""

_LOG_TAIL = 400_000  # bytes at the end of a log that are searched
_LONGEST = 400  # characters of a foreign error's message


def words_of(error: BaseException, code: int, log: Path | None) -> Words:
    """The last words about an error. They name the run's log, if there is one."""
    fault = recognised(error)
    rank = f" (rank {os.environ['RANK']})" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    lines = [f"{type(error).__name__}{rank}: {short(error)}"]
    if fault is not None or not isinstance(error, SalesRLError):
        lines += _advice(fault, log, str(error))
    return Words("\n".join(lines), code, follows=fault is not None and fault.follows)


def short(error: BaseException) -> str:
    """An error's message in one line: the whole of this package's own errors, a part of a long foreign one. Several
    refusals have a line each."""
    message = str(error) if isinstance(error, ConfigErrors) else " ".join(str(error).split())
    return message if isinstance(error, SalesRLError) or len(message) <= _LONGEST else message[:_LONGEST] + " ..."


def words_of_end(log: Path | None, begin: int = 0) -> Words:
    """The last words about a run that a signal ended. Only the launcher gets its number: a crash stands in the log,
    from byte `begin` on, and SIGKILL, which the kernel sends when memory is used up, leaves no line."""
    text = _tail(log, begin) if log is not None else ""
    crash = re.search(r"Fatal Python error: ([A-Z][a-z ]+)", text)
    number = signal.Signals[CRASHES.get(crash[1].strip(), "SIGABRT") if crash else "SIGKILL"]
    signs = [(sign, fault) for fault in FAULTS for sign in fault.signs if not sign.kind and not sign.where]
    signs.sort(key=lambda pair: not pair[0].text)  # the signal alone says least
    fitting = (fault for sign, fault in signs if sign.status in (0, number) and re.search(sign.text, text))
    fault = next(fitting, None)
    lines = [f"The run was ended by {number.name}.", *_advice(fault, log)]
    return Words("\n".join(lines), 128 + number)


def recognised(error: BaseException) -> Fault | None:
    """The first fault of the catalogue with a sign that fits the error, its causes, or the errors of a group."""
    errors = list(_chain(error))
    return next((fault for fault in FAULTS if any(_fits(sign, part) for sign in fault.signs for part in errors)), None)


def _advice(fault: Fault | None, log: Path | None, message: str = "") -> list[str]:
    """What to do. The first address that the error's message names takes the place of `ADDRESS`."""
    where = f"{log} is the run's log." if log is not None else ""
    if fault is None:
        return [f"No known fault. The traceback says where it happened; {PAGE} has the known ones. {where}".rstrip()]
    named = re.search(r"https?://[^\s,)]+?(?=(/healthz|/models)?[.:;]?([\s,)]|$))", message)
    address = named[0] if named else "ADDRESS"
    steps = [f"  {number}. {step.replace('ADDRESS', address)}" for number, step in enumerate(fault.remedies, 1)]
    more = f"More: {PAGE}#{fault.anchor}. {where}".rstrip()
    return [f"{fault.title}. {fault.cause}", "What to do, in this order:", *steps, more]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then its causes, each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop(0)
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting += [current.__cause__, None if current.__suppress_context__ else current.__context__]
        if isinstance(current, BaseExceptionGroup):
            waiting += current.exceptions


def _fits(sign: Sign, error: BaseException) -> bool:
    if sign.status:
        return False
    kinds = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__)
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    places = (f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_qualname}" for frame in frames)
    return (
        (not sign.kind or any(name == sign.kind or name.endswith(f".{sign.kind}") for name in kinds))
        and (not sign.text or re.search(sign.text, str(error)) is not None)
        and (not sign.where or any(re.search(sign.where, place) for place in places))
    )


def _tail(log: Path, begin: int) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - _LOG_TAIL, begin))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
