"""The event loop on which a reward's code runs, beside the one that keeps its deadlines, and the watch over it.

Code that never gives its event loop back is logged with its stack, interrupted when its time is over, and left behind
if that does not end it. Deadlines and messages go on meanwhile. `reward_loop` and `worker` call it.
"""

import asyncio
import contextlib
import contextvars
import ctypes
import itertools
import logging
import re
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any, TypeVar

from salesrl_trl.ground.process import enter
from salesrl_trl.service.event_loop import cancel_others, remaining_s

T = TypeVar("T")

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Time between two looks at whether the loop answers. Looks are counted: seconds pass while the machine sleeps."""
AGAIN_S = 0.25  # the same once code was interrupted
LOGGED_AFTER_S = 10.0  # a loop that is held up for so long is logged
LEFT_AFTER_S = 10.0
"""Time for code to end after it was interrupted. A call that waits in C, like `time.sleep`, does not notice."""
CLOSE_S = 5.0  # longest wait for a reward to close what belongs to its loop
CLOSE_HELD_S = 4.0  # the same, while its loop is held up
_LOOPS = ("salesrl_trl", "asyncio", "threading", "contextvars", "selectors")
"""Modules through which a loop calls other code."""


class HeldUp(BaseException):
    """Raised in code that holds up its event loop when its time is over. No `except Exception` catches it."""


class DaemonThreads(ThreadPoolExecutor):
    """A thread for each call, with the caller's context and devices. One that hangs holds up nothing else."""

    def submit(self, call: Callable[..., T], /, *args: object, **kwargs: object) -> "Future[T]":
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                enter()
                result = call(*args, **kwargs)
            except StopIteration:  # no future takes it
                done.set_exception(RuntimeError("StopIteration"))
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(result)

        threading.Thread(target=contextvars.copy_context().run, args=(run,), name="reward call", daemon=True).start()
        return done


THREADS = DaemonThreads()


class LoopThread:
    """An event loop on a thread of its own, for callers on other threads."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._submitted: set[Future[Any]] = set()  # a coroutine that nobody waits for may be dropped
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.loop.run_forever()

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function on the loop, unless it has ended. Does not wait."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def submit(self, call: Callable[..., Coroutine[Any, Any, T]], *arguments: object) -> "Future[T]":
        """Call a coroutine function on the loop. Does not wait."""

        async def called() -> T:
            return await call(*arguments)

        submitted = asyncio.run_coroutine_threadsafe(called(), self.loop)
        self._submitted.add(submitted)
        submitted.add_done_callback(self._submitted.discard)
        return submitted

    def run(self, call: Callable[..., Coroutine[Any, Any, T]], *arguments: object) -> T:
        """The result of a coroutine function on the loop. Where the wait is interrupted, it is cancelled."""
        return result_of(self.submit(call, *arguments))

    def cancel_all(self) -> None:
        """Cancel all that was submitted. Does not wait."""
        for submitted in [*self._submitted]:
            submitted.cancel()

    def close(self) -> None:
        self.post(self.loop.stop)
        self._thread.join()
        self.loop.close()


def result_of(waiting: "Future[T]") -> T:
    """Wait for what was submitted to a loop. Where the wait is interrupted, it is cancelled."""
    try:
        return waiting.result()
    except BaseException:
        waiting.cancel()
        raise


class Calls:
    """Where a reward's code runs: here on the caller's loop, for a reward that never holds it up."""

    @property
    def is_held(self) -> bool:
        """Whether the code did not give its loop back at the last look."""
        return False

    async def call(self, function: Callable[..., Coroutine[object, object, T]], *arguments: object) -> T:
        """The result of a coroutine function where the code runs, in the caller's context."""
        return await function(*arguments)

    async def aclose(self, aclose: Callable[[], Coroutine[object, object, None]]) -> None:
        """Close the reward. Nothing is called afterwards."""
        await aclose()

    def late(self) -> str:
        """The reason code of a completion whose time is up."""
        return "deadline"

    def held_up(self) -> str:
        """What holds up the loop, in words; an empty text where it is not held up."""
        return ""


class WatchedLoop(LoopThread, Calls):
    """Calls on a loop of their own, which no code may hold up for longer than `deadline_s`. From one other loop.

    `leave` is called on the caller's loop, with a reason code, when code does not give the loop back even though it
    was interrupted. Nothing that is called afterwards is answered.
    """

    def __init__(self, deadline_s: float, leave: Callable[[str], object]) -> None:
        self._deadline_s = deadline_s
        self._leave = leave
        self._calls = 0
        self._is_left = False
        self._is_overdue = False
        self._silent_s = 0.0
        self._watching: asyncio.Task[None] | None = None
        super().__init__("reward calls")
        self.loop.set_default_executor(DaemonThreads())  # for `asyncio.to_thread`

    def _run(self) -> None:
        is_over = False
        while not is_over:
            with contextlib.suppress(HeldUp):  # it came when the code that it was for had just ended
                self.loop.run_forever()
                is_over = True
        if self._is_left:
            self.loop.close()

    async def call(self, function: Callable[..., Coroutine[object, object, T]], *arguments: object) -> T:
        """As `Calls.call`. A call that is cancelled waits until the function has ended."""
        task: asyncio.Task[Any] | None = None
        is_given_up = False  # before it began, because the loop was held up

        async def called() -> T:
            nonlocal task
            task = asyncio.current_task()
            if is_given_up:
                raise asyncio.CancelledError
            enter()
            return await function(*arguments)

        self._calls += 1
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch())
        result = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(called(), self.loop))
        result.add_done_callback(lambda result: result.cancelled() or result.exception())  # the caller may be gone
        try:
            await asyncio.wait([result])
            return result.result()
        except asyncio.CancelledError:
            if not result.done():
                is_given_up = True
                self._is_overdue = self._is_overdue or remaining_s() <= 0
                self.post(lambda: task is not None and task.cancel())
                if not self._is_left:
                    await asyncio.wait([result])
            raise
        finally:
            self._calls -= 1

    async def aclose(self, aclose: Callable[[], Coroutine[object, object, None]]) -> None:
        """Close the reward and end the loop. Code that holds it up is interrupted, and left behind if it goes on."""

        async def closed() -> None:
            await aclose()
            await cancel_others()

        if self.loop.is_closed() or self._is_left:
            return
        self._deadline_s = 2 * LOOK_S  # from now on
        closing = asyncio.ensure_future(self.call(closed))
        waited_s = 0.0
        while not closing.done() and waited_s < (CLOSE_HELD_S if self.is_held else CLOSE_S):
            await asyncio.wait([closing], timeout=LOOK_S)
            waited_s += LOOK_S
        if closing.done():
            self.close()
            closing.result()
        else:
            self._is_left = True
            closing.cancel()

    async def _watch(self) -> None:
        """Look whether the loop answers, as long as there are calls."""
        while self._calls and not self._is_left:
            answered = threading.Event()
            self.post(answered.set)
            await asyncio.sleep(LOOK_S)
            interrupted_s = 0.0
            while not (answered.is_set() or self._is_left):
                self._silent_s += AGAIN_S if interrupted_s else LOOK_S
                # Its own time is over, or after a while that of another call.
                most_s = min(self._deadline_s, LOGGED_AFTER_S) if self._is_overdue else self._deadline_s
                if self._silent_s >= most_s:
                    if not interrupted_s:
                        self._log("its time is over: it is interrupted, and what it scored is missing")
                    if interrupted_s == LEFT_AFTER_S:
                        self._log("although it was interrupted: nothing more is scored")
                        self._leave(self.late())
                    self._interrupt()  # again and again: it may go on, and others like it may come behind it
                    interrupted_s += AGAIN_S
                elif self._silent_s == LOGGED_AFTER_S:
                    self._log("nothing else is scored meanwhile")
                await asyncio.sleep(AGAIN_S if interrupted_s else LOOK_S)
            self._silent_s, self._is_overdue = 0.0, False

    def _interrupt(self) -> None:
        if self._stack():
            thread = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(HeldUp))

    @property
    def is_held(self) -> bool:
        return self._silent_s > 0

    def late(self) -> str:
        stack = self._stack() if self.is_held else []
        if not stack:
            return "deadline"
        return f"{re.sub(r'[^a-z0-9]+', '_', stack[0][0].lower()).strip('_')[:48]}_blocked"

    def held_up(self) -> str:
        stack = self._stack() if self.is_held else []
        return f"{stack[0][0]} at {stack[0][1]} holds up the others for {self._silent_s:g} s" if stack else ""

    def _log(self, what: str) -> None:
        stack = self._stack()
        if not stack:
            logger.error(f"the event loop of rewards does not answer, {what}")
            return
        logger.error(
            f"{stack[0][0]} at {stack[0][1]} does not give the event loop of rewards back, {what}. Expected `await` "
            "wherever it waits, or a function without `async`, which gets a thread of its own. Stack: "
            + ", ".join(f"{place} in {name}" for name, place in stack)
        )

    def _stack(self) -> list[tuple[str, str]]:
        """Name and place of each function under way on the loop, from the first foreign one inwards. Empty if idle."""
        frame: FrameType | None = sys._current_frames().get(self._thread.ident or 0)
        if frame is None or _module(frame) == "selectors":
            return []
        stack = []
        while frame is not None:
            code = frame.f_code
            name, place = code.co_qualname.rpartition("<locals>.")[2], f"{code.co_filename}:{frame.f_lineno}"
            stack.append((_module(frame) in _LOOPS, name, place))
            frame = frame.f_back
        inwards = itertools.dropwhile(lambda entry: entry[0], reversed(stack))
        return [(name, place) for _, name, place in inwards]


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
