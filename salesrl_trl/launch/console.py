"""The console of a run's process: its log lines, the file that keeps them, its last message and exit code."""

import atexit
import contextlib
import logging
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

import transformers

from salesrl_trl.errors import RunStopped, SalesRLError, StopRequested
from salesrl_trl.ground.shutdown import EXIT_INTERRUPTED, EXIT_RESUMABLE
from salesrl_trl.launch.process import keep_log, speak, words_of
from salesrl_trl.telemetry.logs import LINE_FORMAT, TIME_FORMAT, hide_lines


class _Kept:
    """Where this process's lines go."""

    log: Path | None = None
    terminal: int = 2  # file descriptor of the stderr that the process was started with


def set_up_logging(level: int = logging.INFO) -> None:
    """Show this package's lines from `level` on stderr, and only warnings of other packages."""
    logging.basicConfig(level=logging.WARNING, format=LINE_FORMAT, datefmt=TIME_FORMAT)
    logging.getLogger("salesrl_trl").setLevel(level)
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated")  # vLLM reads every attribute
    transformers.utils.logging.disable_progress_bar()
    hide_lines()


def set_log_level(level: str) -> None:
    """Show this package's lines from the level of the setting `log_level` on; `passive` leaves it as it is."""
    if level != "passive":
        logging.getLogger("salesrl_trl").setLevel(level.upper())


def exit_with(error: Exception | KeyboardInterrupt, code: int) -> NoReturn:
    """Print the error and what to do about it, with the traceback of a foreign one or a foreign cause, and end the
    process: with 75 if the run can go on, 130 after Ctrl-C, 1 for a foreign error, else with `code`."""
    if isinstance(error, StopRequested):
        error = RunStopped(f"stopped by {error} before the first step. Give the same command again.")
    elif isinstance(error, KeyboardInterrupt):
        error, code = RunStopped("interrupted by Ctrl-C"), EXIT_INTERRUPTED
    foreign = error.__cause__ if isinstance(error, SalesRLError) else error
    if foreign is not None and not isinstance(foreign, (SalesRLError, StopRequested)):
        traceback.print_exception(foreign)
    if not isinstance(error, SalesRLError):
        code = 1
    elif error.is_resumable and code != EXIT_INTERRUPTED:
        code = EXIT_RESUMABLE
    speak(words_of(error, code, _Kept.log), _Kept.terminal, _Kept.log)
    raise SystemExit(code)


def keep_console(path: Path) -> None:
    """From now on, append the stdout and stderr of this process and its children to the file `path` too. C code and
    children write to file descriptors directly, so two `tee` processes take these over. Processes may share a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _Kept.log = path
    keep_log(path)
    for descriptor in (1, 2):
        _Kept.terminal = original = os.dup(descriptor)
        # A session of its own: a signal to this process's group would end `tee` before the last lines are written.
        # SIGPIPE stays ignored, as Python has it: `tee` goes on with the file when the console ends, as with `| head`.
        tee = subprocess.Popen(
            ["tee", "-a", str(path)], stdin=subprocess.PIPE, stdout=original, stderr=subprocess.DEVNULL,
            start_new_session=True, restore_signals=False,
        )  # fmt: skip
        assert tee.stdin is not None
        os.dup2(tee.stdin.fileno(), descriptor)
        tee.stdin.close()
        atexit.register(_give_back, tee, descriptor, original)  # runs after the traceback of a last error


def _give_back(tee: subprocess.Popen[bytes], descriptor: int, original: int) -> None:
    """Wait until the last lines are written, so that none comes after the shell's next prompt."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(original, descriptor)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a child that lives on holds the pipe's other end
        tee.wait(timeout=2)
