"""The end of a launch: last words after all other lines, and the exit code of the run.

`accelerate launch` prints a traceback when a run has failed, and ends with exit code 1. So a run leaves its last words
in a folder of the launch. One of two prints them:

- accelerate's own process, in which `end_as_the_run_did` is called at its start, by a `.pth` file that
  scripts/install.sh writes: it drops that traceback and ends with the run's exit code;
- without that file a process of its own, which waits for accelerate's end. The exit code stays 1: no process can set
  another one's.

Owns the folder and both ways. Refuses to decide the words: `last_words` does. Standard library only, because
accelerate's process imports it before anything else, as a command does before the imports that take seconds.
"""

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType

from salesrl_trl.ground import shutdown as tidy_end
from salesrl_trl.ground.process import stat_of
from salesrl_trl.ground.shutdown import say
from salesrl_trl.run import signals
from salesrl_trl.run.fault import Words

FOLDER = "SALESRL_TRL_LAUNCH"
"""Environment variable with the folder, where accelerate's process will print the words."""
_LAUNCHERS = ("accelerate", "torchrun", "torch.distributed.run")
_LOG = "log"
_POLL_S = 0.05
_PATIENCE_S = 120.0
"""Seconds that a launcher may take to end the other processes of a run: torch gives them 30."""

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def speak(words: Words, terminal: int = 2) -> None:
    """Print this process's last words, unless another process of the launch did so. Leave them for the launch's end.

    Args:
        words (`Words`):
            What this process ends with.
        terminal (`int`, *optional*, defaults to stderr):
            File descriptor on which words that come after the launcher's own lines are printed.
    """
    launcher = _launcher()
    given = os.environ.get(FOLDER)
    if given is None and launcher is None:
        say(words.text)
        return
    try:
        folder = Path(given) if given else Path(tempfile.gettempdir()) / f"salesrl_trl-{launcher}-{_started(launcher)}"
        folder.mkdir(mode=0o700, exist_ok=True)
        unfinished = folder / f"{os.getpid()}.part"
        unfinished.write_text(json.dumps({**asdict(words), "at": time.monotonic()}), encoding="utf-8")
        unfinished.rename(unfinished.with_suffix(".json"))
        with contextlib.suppress(FileExistsError):
            (folder / f"spoken-{words.follows}").touch(exist_ok=False)
            say(words.text)
        if given is None and len(list(folder.glob("spoken-*"))) == 1:
            with contextlib.suppress(FileExistsError):
                (folder / "followed").touch(exist_ok=False)
                subprocess.Popen(
                    [sys.executable, "-m", __name__, str(folder), str(launcher), _started(launcher)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=terminal,
                    start_new_session=True,  # a signal to the launch's group is not meant for it
                )
    except OSError:  # a full disk, for example: the words come before the launcher's own lines alone
        say(words.text)


def end_tidily() -> None:
    """`tidy_end` for a command that may be launched: its line comes at the launch's end, and its exit code counts."""
    tidy_end.end_tidily(_tell)


def begin_run() -> None:
    """`end_tidily` for a recipe. From now on a signal stops it, and so does the end of its launcher."""
    end_tidily()
    signals.catch(_tell)
    if (launcher := _launcher()) is not None:
        signals.die_with(launcher)


def _tell(text: str, code: int) -> None:
    speak(Words(text, code))


def keep_log(path: Path) -> None:
    """Let accelerate's process find the run's log, for the case that a signal ends the run without last words."""
    if given := os.environ.get(FOLDER):
        with contextlib.suppress(OSError):  # without room for it, such words do without the log
            Path(given).mkdir(mode=0o700, exist_ok=True)
            (Path(given) / _LOG).write_text(str(path.resolve()), encoding="utf-8")


def end_as_the_run_did() -> None:
    """In accelerate's process: at its end print the run's last words, and take over its exit code.

    A signal goes on to the run, and the launcher waits: it takes time to save a checkpoint. By itself, accelerate
    would end at once and leave the run, and torch's launcher would kill the run after half a minute.
    """
    folder = Path(tempfile.gettempdir()) / f"salesrl_trl-{uuid.uuid4().hex}"
    os.environ[FOLDER] = str(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    sys.excepthook = functools.partial(_end, folder, sys.excepthook)
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # torch's launcher leaves the others as they are
    for number in signals.CAUGHT:
        if not signals.is_left(number):
            signal.signal(number, _pass_on)


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Send a signal on to the run, unless it has none yet."""
    runs = _children()
    if not runs:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    for run in runs:
        with contextlib.suppress(ProcessLookupError):
            may_have_it = number == signal.SIGINT and os.getpgid(run) == os.getpgrp()
            os.kill(run, signal.SIGTERM if may_have_it else number)  # a second SIGINT would end it at once


def _children() -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/self/task/{os.getpid()}/children").read_text("utf-8").split()]
    except OSError:
        return []


def _end(
    folder: Path, usual: _Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    status = _status(error)
    if status is None or not folder.is_dir():  # no run of this package
        usual(kind, error, trace)
        return
    words = _first(folder)
    if words is None and status < 0:
        from salesrl_trl.run.last_words import words_of_signal

        log = folder / _LOG
        words = words_of_signal(-status, Path(log.read_text("utf-8")) if log.is_file() else None)
        say(words.text)
    elif words is None:
        usual(kind, error, trace)
    elif not isinstance(error, subprocess.CalledProcessError):  # of several processes, others have spoken since
        say(words.text)
    raise SystemExit(words.code if words is not None else status)


def _status(error: BaseException) -> int | None:
    """Exit status of the process that failed, of several the first; negative for a signal. None for another error."""
    if isinstance(error, subprocess.CalledProcessError):
        return error.returncode
    if type(error).__name__ == "ChildFailedError":  # torch's, for several processes; no import of torch for it
        return int(error.get_first_failure()[1].exitcode)  # type: ignore[attr-defined]
    return None


def _first(folder: Path) -> Words | None:
    """The words of the process whose error came first and follows from no other."""
    all_words = [Words(**json.loads(path.read_text("utf-8"))) for path in folder.glob("*.json")]
    return min(all_words, key=lambda words: (words.follows, words.at), default=None)


def _launcher() -> int | None:
    """Process id of the launcher, if this process was started by one."""
    parent = os.getppid()
    try:
        argv = Path(f"/proc/{parent}/cmdline").read_text("utf-8", errors="replace").split("\0")
    except OSError:
        return None
    named = (Path(part).name for part in argv[:3])
    return parent if any(name.startswith(_LAUNCHERS) for name in named) else None


def _started(pid: int | None) -> str:
    """When a process was started, in the kernel's ticks; empty when it has ended. Process ids are used again."""
    found = stat_of(pid) if pid is not None else None
    # a parent may read all output before it asks for the exit code
    return found[2] if found is not None and found[0] != "Z" else ""


def _follow(folder: Path, launcher: int, started: str) -> None:
    """Print the first words when the launcher has ended."""
    until = time.monotonic() + _PATIENCE_S
    while _started(launcher) == started and time.monotonic() < until:
        time.sleep(_POLL_S)
    words = _first(folder)
    shutil.rmtree(folder, ignore_errors=True)
    if words is not None:
        say(words.text)


if __name__ == "__main__":
    _follow(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
