"""Handles signals: a run stops with a checkpoint, and the same command resumes it.

Owns the signal handlers of this process, and stops a run whose launcher has died. `train` passes a function that
decides how to stop. Standard library only: it is called before imports that take seconds. A SIGTERM during training:

    _on                                 the handler: notes the reason, calls the function passed to `handed_to`
    Stopping.request                    update.stopping: cancels the rewards. A single process raises `StopRequested`;
                                        several processes first agree, and stop after the step
    Stopping.save_after                 restores the last complete step, saves it, creates a `RunStopped`
    console.exit_with                   the final error summary; exit code 75, "resume by the same command"
    _exit_in_time                       the same code, if another thread blocks the interpreter's exit
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from salesrl_trl.errors import StopRequested
from salesrl_trl.ground.shutdown import EXIT_INTERRUPTED, EXIT_RESUMABLE, ReportLine, print_line

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # from a terminal or a scheduler
AT_ONCE = "a second Ctrl-C: quitting immediately. The last checkpoint is kept."
EXIT_S = 5.0  # for the interpreter to exit after a signal: it also waits for threads that hang in user code
POLL_S = 0.25  # interval between checks whether it exits
Stop = Callable[[str], object]  # gets the name of a signal


@dataclass
class _SignalAsked:
    reason: str | None = None
    stop: Stop | None = None
    interrupts: int = 0
    report: ReportLine = print_line


_asked = _SignalAsked()


def catch(report: ReportLine | None = None) -> None:
    """From now on, the first signal raises `StopRequested` in the main thread, and a second Ctrl-C quits immediately,
    with a line for `report`. An ignored SIGHUP, as under `nohup`, stays ignored."""
    _asked.report = report or _asked.report
    for number in CAUGHT:
        # A shell's background jobs ignore Ctrl-C too, but sending it to a run is intentional.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _on)


@contextlib.contextmanager
def handed_to(stop: Stop) -> Iterator[None]:
    """While active, a signal calls `stop` with its name instead of raising."""
    catch()  # a library may have replaced the handlers
    _asked.stop = stop
    try:
        if _asked.reason is not None:  # the exception was swallowed
            stop(_asked.reason)
        yield
    finally:
        _asked.stop = None


def die_with(launcher: int) -> None:
    """Stop this process when its launcher dies, or now if it has died."""
    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != launcher:
        raise StopRequested("the end of its launcher")


def _on(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
        _asked.interrupts += 1
        if _asked.interrupts > 1:
            _asked.report(AT_ONCE, EXIT_INTERRUPTED)
            os._exit(EXIT_INTERRUPTED)
    if _asked.reason is not None:  # e.g. from a launcher that got the same signal
        return
    _asked.reason = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    threading.Thread(target=_exit_in_time, daemon=True).start()
    if _asked.stop is None:
        raise StopRequested(_asked.reason)
    _asked.stop(_asked.reason)


def _exit_in_time() -> None:
    waited_s = 0.0
    while waited_s < EXIT_S:  # for threads only: exit handlers, such as a tracker's upload, have their own timeouts
        time.sleep(POLL_S)
        waited_s = waited_s + POLL_S if _exits() else 0.0
    os._exit(EXIT_RESUMABLE)


def _exits() -> bool:
    """Whether the interpreter waits for other threads before exiting, as the main thread's first function shows."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_shutdown"
