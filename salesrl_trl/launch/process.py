"""The final error summary of a launch: what failed, how to fix it, and the exit code.

`accelerate launch` ends a failed run with a traceback and exit code 1. Therefore each process writes its summary, an
exit code followed by text, to the launch folder. A helper process that outlives launcher and run prints the first
summary, or creates one if a signal killed the run. `scripts/supervise.sh` sets the folder in `SALESRL_TRL_LAUNCH`;
otherwise it is temporary. `OUTPUT_DIR/last_words.txt` is a permanent copy. `catalogue.toml` lists the known faults, of
which the first match counts; it is read on import, in case file descriptors run out later. Standard library only:
commands call this before imports that take seconds.
"""

import atexit
import contextlib
import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from salesrl_trl.errors import SalesRLError
from salesrl_trl.ground import shutdown
from salesrl_trl.ground.shutdown import print_line
from salesrl_trl.launch import signals

FOLDER = "SALESRL_TRL_LAUNCH"  # environment variable with the launch folder
LAST_WORDS = "last_words.txt"  # file in a run's folder, while no run is active there
_FIRST, _FOLLOWING = "first", "following"  # files: the first error, and an error that follows from it
_LOG = "log"


@dataclass(frozen=True)
class Sign:
    """How to recognise an error: all given fields must match. `catalogue.toml` documents them."""

    text: str = ""
    kind: str = ""
    where: str = ""
    status: int = 0


@dataclass(frozen=True)
class Fault:
    """A fault and its remedies, cheapest first. `follows`: whether another process's error is the cause."""

    title: str
    cause: str
    signs: tuple[Sign, ...]
    remedies: tuple[str, ...]
    follows: bool = False


@dataclass(frozen=True)
class Words:
    """The final error summary of a process."""

    text: str
    code: int  # exit code
    follows: bool = False  # whether the error follows from another process's, which is then reported instead


_TABLE = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))
CRASHES: dict[str, str] = _TABLE["crashes"]
FAULTS = tuple(
    Fault(**fault | {"signs": tuple(Sign(**sign) for sign in fault["signs"]), "remedies": tuple(fault["remedies"])})
    for fault in _TABLE["fault"]
)
"""In matching order."""

_LONGEST = 400  # maximum length of a foreign error's message


def words_of(error: BaseException, code: int, log: Path | None) -> Words:
    """The summary of an error, with the run's log if there is one."""
    fault = recognised(error)
    rank = f" (rank {os.environ['RANK']})" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    lines = [f"{type(error).__name__}{rank}: {short(error)}"]
    if fault is not None or not isinstance(error, SalesRLError):
        lines += advice(fault, log, str(error))
    return Words("\n".join(lines), code, follows=fault is not None and fault.follows)


def short(error: BaseException) -> str:
    """An error's message on one line; long messages of foreign errors are truncated."""
    message = " ".join(str(error).split())
    return message if isinstance(error, SalesRLError) or len(message) <= _LONGEST else message[:_LONGEST] + " ..."


def words_of_end(log: Path | None, begin: int = 0) -> Words:
    """The summary of a run killed by a signal. Only the launcher gets the signal's number: crashes are logged, after
    byte `begin`, whereas SIGKILL, which the kernel sends when memory runs out, is not."""
    text = _tail(log, begin) if log is not None else ""
    crash = re.search(r"Fatal Python error: ([A-Z][a-z ]+)", text)
    number = signal.Signals[CRASHES.get(crash[1].strip(), "SIGABRT") if crash else "SIGKILL"]
    signs = [(sign, fault) for fault in FAULTS for sign in fault.signs if not sign.kind and not sign.where]
    fitting = [(sign, fault) for sign, fault in signs if sign.status in (0, number) and re.search(sign.text, text)]
    specific = [fault for sign, fault in fitting if sign.text]  # more than the signal
    fault = next(iter(specific or [fault for _, fault in fitting]), None)
    lines = [f"The run was ended by {number.name}.", *advice(fault, log)]
    return Words("\n".join(lines), 128 + number)


def recognised(error: BaseException) -> Fault | None:
    """The first fault in the catalogue that matches the error, its causes, or the errors of a group."""
    errors = list(_chain(error))
    return next((fault for fault in FAULTS if any(_fits(sign, part) for sign in fault.signs for part in errors)), None)


def advice(fault: Fault | None, log: Path | None, message: str = "") -> list[str]:
    """The remedies. The first address in the error's message replaces `ADDRESS`."""
    where = f"{log} is the run's log." if log is not None else ""
    if fault is None:
        return [f"Unknown error: see the traceback. {where}".rstrip()]
    named = re.search(r"https?://[^\s,)]+?(?=(/healthz|/models)?[.:;]?([\s,)]|$))", message)
    address = named[0] if named else "ADDRESS"
    steps = [f"  {number}. {step.replace('ADDRESS', address)}" for number, step in enumerate(fault.remedies, 1)]
    return [f"{fault.title}. {fault.cause}", "What to do, in this order:", *steps, *filter(None, [where])]


def _chain(error: BaseException) -> Iterator[BaseException]:
    left, seen = [error], set[int]()
    while left:
        error = left.pop()
        if id(error) in seen:  # causes may be circular
            continue
        seen.add(id(error))
        yield error
        context = None if error.__suppress_context__ else error.__context__
        inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        left += [cause for cause in (*reversed(inner), context, error.__cause__) if cause is not None]


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
            file.seek(max(log.stat().st_size - 400_000, begin))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def end_tidily() -> None:
    """`shutdown.end_tidily` for a command that may have a launcher: prints its line at the end of the launch."""
    shutdown.end_tidily(_speak_line)


def begin_run(is_recipe: bool = True) -> None:
    """`end_tidily` for a recipe. From now on, a signal or the end of its launcher stops it.

    `is_recipe`: whether to answer a recipe's `--help` here. Other commands have their own.
    """
    end_tidily()
    if is_recipe and not {"-h", "--help"}.isdisjoint(sys.argv[1:]):
        from salesrl_trl.launch.settings_help import answer_help

        answer_help(sys.argv[1:])
    signals.catch(_speak_line)
    with contextlib.suppress(AttributeError, OSError, ValueError):  # a stderr without a descriptor
        faulthandler.enable()  # a crash names its signal in the log
    folder, launcher = _folder(), _launcher()
    if folder is not None:
        with contextlib.suppress(OSError):  # a full disk; a killed run then lacks a summary
            folder.mkdir(mode=0o700, exist_ok=True)
            _running(folder, os.getpid()).write_text(_started(os.getpid()), "utf-8")
            atexit.register(lambda: _running(folder, os.getpid()).unlink(missing_ok=True))
            _wait_beside(folder, launcher)
    if launcher is not None:
        signals.die_with(launcher)


def _speak_line(text: str, code: int) -> None:
    speak(Words(text, code))


def keep_log(path: Path) -> None:
    """Note the path of the run's log and its size before this run. The summary will be copied next to it."""
    path.with_name(LAST_WORDS).unlink(missing_ok=True)
    if (folder := _folder()) is not None:
        with contextlib.suppress(OSError):  # a full disk; the summary then lacks the log
            folder.mkdir(mode=0o700, exist_ok=True)
            size = path.stat().st_size if path.is_file() else 0
            (folder / _LOG).write_text(f"{size} {path.resolve()}", encoding="utf-8")


def speak(words: Words, terminal: int = 2, log: Path | None = None) -> None:
    """Print this process's error summary, unless another process of the launch did, and keep it for the launch's end.

    `terminal`: the file descriptor for the summary after the launcher's output. A copy is saved next to `log`.
    """
    folder, is_first = _folder(), True
    with contextlib.suppress(OSError):  # e.g. a full disk: the summary then only appears before the launcher's output
        if folder is not None:
            folder.mkdir(mode=0o700, exist_ok=True)
            is_first = _leave(folder / (_FOLLOWING if words.follows else _FIRST), words)
            _wait_beside(folder, _launcher(), terminal)
        if log is not None and is_first:
            _leave(log.with_name(LAST_WORDS), words)
    if is_first:
        print_line(words.text)


def _leave(file: Path, words: Words) -> bool:
    """Write a summary atomically, unless one exists. Returns whether it was written."""
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    unfinished.write_text(f"{words.code}\n{words.text}\n", encoding="utf-8")
    try:
        os.link(unfinished, file)
    except FileExistsError:
        return False
    finally:
        unfinished.unlink()
    return True


def _first(folder: Path) -> Words | None:
    for file in (folder / _FIRST, folder / _FOLLOWING):
        if file.is_file():
            code, _, text = file.read_text("utf-8").partition("\n")
            return Words(text.removesuffix("\n"), int(code))
    return None


def _folder() -> Path | None:
    """The launch folder; `None` for a process without a launcher."""
    named, launcher = os.environ.get(FOLDER), _launcher()
    if named:
        return Path(named)
    return Path(tempfile.gettempdir()) / f"salesrl_trl-{launcher}-{_started(launcher)}" if launcher else None


def _launcher() -> int | None:
    parent = os.getppid()
    try:
        argv = Path(f"/proc/{parent}/cmdline").read_text("utf-8", errors="replace").split("\0")
    except OSError:
        return None
    launchers = ("accelerate", "torchrun", "torch.distributed.run")
    return parent if any(Path(part).name.startswith(launchers) for part in argv[:3]) else None


def stat_of(pid: int) -> tuple[str, int, str] | None:
    """A process's state, parent and start time from the kernel; `None` if it does not exist, or outside Linux. State Z
    is a process not yet reaped by its parent. The start time, in ticks, distinguishes processes that reuse an id."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), fields[19]


def _started(pid: int | None) -> str:
    """When a process was started, in kernel ticks; empty if it has ended. Needed because process ids are reused."""
    stat = stat_of(pid) if pid is not None else None
    # a parent may read all output before it waits for the exit code
    return stat[2] if stat is not None and stat[0] != "Z" else ""


def _running(folder: Path, pid: int) -> Path:
    return folder / f"running-{pid}"


def _wait_beside(folder: Path, launcher: int | None, terminal: int = 2) -> None:
    """Start the process that waits for the end of the launch, unless it runs. Its id is in the file `waiting`."""
    try:
        file = (folder / "waiting").open("x", encoding="utf-8")
    except FileExistsError:
        return
    pid = launcher if launcher is not None else os.getpid()
    command = [sys.executable, "-m", __name__, str(folder), str(pid), _started(pid)]
    quiet = subprocess.DEVNULL
    with file:  # in its own session, so that signals to the launch's process group do not reach it
        waiting = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=terminal, start_new_session=True)
        file.write(str(waiting.pid))


def _wait(pid: int, started: str) -> None:
    while _started(pid) == started:
        time.sleep(0.2)


def _print_at_the_end(folder: Path, launcher: int, started: str) -> None:
    """Wait for the launcher and all processes of the run, then print the first summary, or one for a killed run."""
    is_launched = not _running(folder, launcher).exists()
    _wait(launcher, started)
    killed = False
    while begun := list(folder.glob("running-*")):
        for file in begun:
            _wait(int(file.name.partition("-")[2]), file.read_text("utf-8") if file.is_file() else "")
            if file.is_file():  # it did not end by itself
                killed = True
                file.unlink()
    words = _first(folder)
    if words is None and killed:
        size, _, log = (folder / _LOG).read_text("utf-8").partition(" ") if (folder / _LOG).is_file() else ("", "", "")
        words = words_of_end(Path(log) if log else None, int(size or 0))
        _leave(folder / _FIRST, words)
        if log:
            with contextlib.suppress(OSError):
                _leave(Path(log).with_name(LAST_WORDS), words)
    if not os.environ.get(FOLDER):  # else its owner reads it now
        shutil.rmtree(folder, ignore_errors=True)
    if words is not None and (killed or is_launched):  # else it was already printed last
        print_line(words.text)


if __name__ == "__main__":
    _print_at_the_end(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
