"""The console of a run's process: log lines and their file, the final error summary and the exit code."""

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

from salesrl_trl.errors import ConfigError, DataError, RunStopped, SalesRLError, StopRequested
from salesrl_trl.ground.shutdown import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_RESUMABLE
from salesrl_trl.launch.process import keep_log, speak, words_of
from salesrl_trl.telemetry.logs import LINE_FORMAT, TIME_FORMAT, hide_lines


class _Kept:
    """The destinations of this process's output."""

    log: Path | None = None
    terminal: int = 2  # file descriptor of the original stderr


def set_up_logging(level: int = logging.INFO) -> None:
    """Log this package's lines from `level` on to stderr, and only warnings of other packages."""
    logging.basicConfig(level=logging.WARNING, format=LINE_FORMAT, datefmt=TIME_FORMAT)
    logging.getLogger("salesrl_trl").setLevel(level)
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated")  # vLLM reads every attribute
    warnings.filterwarnings(
        "ignore", "`is_gradient_checkpointing` is deprecated"
    )  # TRL reads it with transformers 5.24
    transformers.utils.logging.disable_progress_bar()
    hide_lines()


def set_log_level(level: str) -> None:
    """Apply the setting `log_level` to this package; `passive` does nothing."""
    if level != "passive":
        logging.getLogger("salesrl_trl").setLevel(level.upper())


def exit_with(error: Exception | KeyboardInterrupt, code: int) -> NoReturn:
    """Print the error and its remedies, with the traceback of a foreign error or cause, and exit: with 75 if the run
    is resumable, 130 after Ctrl-C, 1 for a foreign error, 2 for invalid settings or rows, else with `code`."""
    if isinstance(error, StopRequested):
        error = RunStopped(f"stopped by {error} before the first step. Run the same command again.")
    elif isinstance(error, KeyboardInterrupt):
        error, code = RunStopped("interrupted by Ctrl-C"), EXIT_INTERRUPTED
    foreign = error.__cause__ if isinstance(error, SalesRLError) else error
    if foreign is not None and not isinstance(foreign, (SalesRLError, StopRequested)):
        traceback.print_exception(foreign)
    if not isinstance(error, SalesRLError):
        code = 1
    elif error.is_resumable and code != EXIT_INTERRUPTED:
        code = EXIT_RESUMABLE
    elif isinstance(error, (ConfigError, DataError)):  # some are only found by the trainer
        code = EXIT_BAD_INPUT
    speak(words_of(error, code, _Kept.log), _Kept.terminal, _Kept.log)
    raise SystemExit(code)


def keep_console(path: Path) -> None:
    """From now on, also append the stdout and stderr of this process and its children to the file `path`. C code and
    children write to file descriptors directly, so two `tee` processes replace these. Processes may share a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _Kept.log = path
    keep_log(path)
    for descriptor in (1, 2):
        _Kept.terminal = original = os.dup(descriptor)
        # In its own session: a signal to this process's group would end `tee` before the last lines are written.
        # SIGPIPE stays ignored, as in Python: `tee` keeps writing the file if the console is closed, as by `| head`.
        tee = subprocess.Popen(
            ["tee", "-a", str(path)], stdin=subprocess.PIPE, stdout=original, stderr=subprocess.DEVNULL,
            start_new_session=True, restore_signals=False,
        )  # fmt: skip
        assert tee.stdin is not None
        os.dup2(tee.stdin.fileno(), descriptor)
        tee.stdin.close()
        atexit.register(_give_back, tee, descriptor, original)  # runs after the last error's traceback


def _give_back(tee: subprocess.Popen[bytes], descriptor: int, original: int) -> None:
    """Wait until the last lines are written, so that none appears after the shell's next prompt."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(original, descriptor)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a surviving child holds the pipe's other end
        tee.wait(timeout=2)
