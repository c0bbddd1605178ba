"""Exit codes, and a one-line message instead of a traceback for commands ended by Ctrl-C or an unwritable output.
Standard library only."""

import atexit
import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable
from types import TracebackType

from salesrl_trl.errors import StopRequested

EXIT_BAD_INPUT = 2  # invalid settings or data, or the checks before a run rejected its addresses or model
EXIT_FAILED = 3  # a run started and failed permanently, e.g. because it diverged
EXIT_INTERRUPTED = 128 + signal.SIGINT  # exit code after Ctrl-C, as shells have it
EXIT_UNREAD = 128 + signal.SIGPIPE  # the reader of the output has exited, as with `| head`
EXIT_UNWRITTEN = 2
EXIT_RESUMABLE = 75  # the run stopped early, and the same command resumes it. `EX_TEMPFAIL` of sysexits.h.
_FAULTS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # when writing the output

ReportLine = Callable[[str, int], object]  # receives a line and the exit code


def print_line(text: str, code: int = 0) -> None:
    """A `ReportLine` that prints to stderr and ignores the code."""
    sys.stderr.write(f"\n{text}\n")  # the terminal shows ^C on the previous line
    sys.stderr.flush()


def end_tidily(report: ReportLine = print_line) -> None:
    """From now on, Ctrl-C and an unwritable output end this process with a single line, wherever they occur."""
    usual = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, StopRequested):  # while the run is importing packages
            report(f"stopped by {error} before the run began. The same command starts it again.", EXIT_RESUMABLE)
            raise SystemExit(EXIT_RESUMABLE)
        if is_interrupt(error):
            report("interrupted by Ctrl-C", EXIT_INTERRUPTED)
            raise SystemExit(EXIT_INTERRUPTED)
        if isinstance(error, OSError) and error.filename is None and error.errno in _FAULTS:
            raise SystemExit(_unwritten(error, report))
        usual(kind, error, trace)

    sys.excepthook = end
    atexit.register(_flush, report)


def is_interrupt(error: BaseException | None) -> bool:
    """Whether it is Ctrl-C, or an `ImportError` that a library made of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        if isinstance(error, ImportError) and "KeyboardInterrupt" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return error is not None


def _unwritten(error: OSError, report: ReportLine) -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise Python's final flush fails again
    if error.errno == errno.EPIPE:
        return EXIT_UNREAD
    line = f"the output can't be written ({error.strerror}). Redirect stdout to a place with free space."
    with contextlib.suppress(OSError):  # stderr may go to the same place
        report(line, EXIT_UNWRITTEN)
    return EXIT_UNWRITTEN


def _flush(report: ReportLine) -> None:
    """Flush stdout as the process's last action. Python itself would report an error here as ignored."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        os._exit(_unwritten(error, report))  # nothing else can change the exit code here
