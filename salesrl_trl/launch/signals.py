"""What a signal does to a run: it ends with a checkpoint, and goes on by the same command.

Owns the handlers of this process, and what happens to a run whose launcher has died. `train` hands over a function
that decides what a stop does. Standard library only: it is called before the imports that take seconds. A SIGTERM
during training, in order:

    _on                                 the handler: notes the reason, calls what `handed_to` was given
    Stopping.request                    update.stopping: cuts the rewards off. One process raises `StopRequested`;
                                        of several processes all learn of it first, and stop after the step
    Stopping.save_after                 restores the last whole step, saves it, makes a `RunStopped`
    console.exit_with                   the last words; exit code 75, "go on by the same command"
    _exit_in_time                       the same code, if a thread of somebody's holds the interpreter up
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

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # of a terminal, or a scheduler
AT_ONCE = "a second Ctrl-C: this process quits at once. What the last checkpoint holds is kept."
EXIT_S = 5.0  # for the interpreter to exit after a signal: it waits for threads, also for one that hangs in user code
POLL_S = 0.25  # time between two looks at whether it exits, after a signal


@dataclass
class _SignalAsked:
    reason: str | None = None
    stop: Callable[[str], object] | None = None
    interrupts: int = 0
    report: ReportLine = print_line


_asked = _SignalAsked()


def catch(report: ReportLine | None = None) -> None:
    """From now on, the first signal raises `StopRequested` in the main thread, and a second Ctrl-C quits at once, with
    a line for `report`. A hang-up that is ignored, as under `nohup`, stays ignored."""
    _asked.report = report or _asked.report
    for number in CAUGHT:
        # A shell's background job ignores Ctrl-C too, but whoever sends it to a run means it.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _on)


@contextlib.contextmanager
def handed_to(stop: Callable[[str], object]) -> Iterator[None]:
    """While active, a signal calls `stop` with its name, in place of raising."""
    catch()  # a library may have taken them
    _asked.stop = stop
    try:
        if _asked.reason is not None:  # somebody has swallowed the exception
            stop(_asked.reason)
        yield
    finally:
        _asked.stop = None


def die_with(launcher: int) -> None:
    """Have this process stop when its launcher dies, or now if it is dead."""
    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != launcher:
        raise StopRequested("the end of its launcher")


def _on(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
        _asked.interrupts += 1
        if _asked.interrupts > 1:
            _asked.report(AT_ONCE, EXIT_INTERRUPTED)
            os._exit(EXIT_INTERRUPTED)
    if _asked.reason is not None:  # also from a launcher that was told with this process
        return
    _asked.reason = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    threading.Thread(target=_exit_in_time, daemon=True).start()
    if _asked.stop is None:
        raise StopRequested(_asked.reason)
    _asked.stop(_asked.reason)


def _exit_in_time() -> None:
    waited_s = 0.0
    while waited_s < EXIT_S:  # of threads alone: what runs at exit, such as a tracker's upload, has its own time
        time.sleep(POLL_S)
        waited_s = waited_s + POLL_S if _exits() else 0.0
    os._exit(EXIT_RESUMABLE)


def _exits() -> bool:
    """Whether the interpreter waits for other threads before it exits. The main thread's first function shows it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_shutdown"
