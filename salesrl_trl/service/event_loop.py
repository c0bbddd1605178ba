"""Event loops: the clock for all service waits, reward deadlines, per-loop objects, and threads that run a loop.

A deadline is stored in a context variable, which tasks started inside inherit. It cancels nothing: waiting code checks
the remaining time. Deadlines run on a separate loop, so that code which blocks its own loop can be reported by name.
"""

import asyncio
import contextlib
import contextvars
import logging
import math
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from salesrl_trl.errors import ServiceError
from salesrl_trl.ground.process import enter

logger = logging.getLogger(__name__)

T = TypeVar("T")

CANCEL_GRACE_S = 1.0  # longest wait for cancelled tasks, which are then abandoned
CLOSE_S = 8.0  # longest wait for a reward to release its loop's resources
_LOOPS = ("salesrl_trl", "asyncio", "threading", "contextvars", "selectors")  # modules through which a loop calls code
_END: ContextVar[float] = ContextVar("salesrl_trl_deadline", default=math.inf)


def now() -> float:
    """Seconds on the running event loop's clock: `time.monotonic`, or virtual time in tests."""
    return asyncio.get_running_loop().time()


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Everything inside must finish within `seconds`. An earlier outer deadline stays in force."""
    token = _END.set(min(_END.get(), now() + seconds))
    try:
        yield
    finally:
        _END.reset(token)


def remaining_s() -> float:
    """Seconds left until the deadline: at least 0, infinite without one."""
    return max(_END.get() - now(), 0.0)


async def clocked(call: Awaitable[T]) -> tuple[T, float] | ServiceError:
    """The answer and its duration, or the error. Other exceptions become a `ServiceError`, since other ranks wait."""
    started = now()
    try:
        answer = await call
    except ServiceError as error:
        return error
    except Exception as error:
        name = type(error).__name__
        return ServiceError(f"the call raised {name}", f"raised_{name}")
    return answer, now() - started


def is_cancelled() -> bool:
    """Whether the running task itself was cancelled, and not only something that it awaits."""
    return (task := asyncio.current_task()) is not None and task.cancelling() > 0


def retrieve(future: asyncio.Future[T]) -> None:
    """Retrieve an exception that nobody may await, which asyncio would otherwise log."""
    if not future.cancelled():
        future.exception()


async def cancel(tasks: Iterable[asyncio.Future[T]]) -> None:
    """Cancel tasks of the running loop. Tasks that still run after `CANCEL_GRACE_S` are abandoned."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CANCEL_GRACE_S)


class PerLoop(Generic[T]):
    """One object per event loop: connections, events and tasks can't be shared between loops."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[object, ...]:
        return PerLoop, (self._make,)  # another process has other loops

    def get(self) -> T:
        loop = asyncio.get_running_loop()
        if loop not in self._made:
            self._made[loop] = self._make()
        return self._made[loop]

    def pop(self) -> T | None:
        """Remove and return the running loop's object, if it has one."""
        return self._made.pop(asyncio.get_running_loop(), None)


class DaemonThreads(ThreadPoolExecutor):
    """Runs each call on its own thread, with the caller's context and devices, so a hung call blocks nothing else."""

    def submit(self, call: Callable[..., T], /, *args: object, **kwargs: object) -> "Future[T]":
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                enter()
                result = call(*args, **kwargs)
            except StopIteration:  # futures reject it
                done.set_exception(RuntimeError("StopIteration"))
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(result)

        threading.Thread(target=contextvars.copy_context().run, args=(run,), name="reward call", daemon=True).start()
        return done


THREADS = DaemonThreads()


class LoopThread:
    """An event loop on a dedicated thread, for callers on other threads."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._submitted: set[object] = set()  # otherwise unawaited coroutines may be garbage-collected
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:  # the thread keeps this object alive
        self.loop.run_forever()

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function on the loop, unless it has closed. Does not wait."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def submit(self, call: Coroutine[object, object, T]) -> "Future[T]":
        """Run a coroutine on the loop. Does not wait."""
        submitted = asyncio.run_coroutine_threadsafe(call, self.loop)
        self._submitted.add(submitted)
        submitted.add_done_callback(self._submitted.discard)
        return submitted

    def run(self, call: Coroutine[object, object, T]) -> T:
        """Run a coroutine on the loop and return its result. Interrupting the wait cancels it."""
        waiting = self.submit(call)
        try:
            return waiting.result()
        except BaseException:
            waiting.cancel()
            raise

    def close(self) -> None:
        self.post(self.loop.stop)
        self._thread.join()
        self.loop.close()


class WatchedLoop(LoopThread):
    """A dedicated loop for custom code, which may block it. Called from one other loop."""

    def __init__(self) -> None:
        super().__init__("reward calls")
        self._called: set[asyncio.Task[object]] = set()  # on the loop
        self.loop.set_default_executor(THREADS)  # for `asyncio.to_thread`

    async def call(self, function: Callable[..., Coroutine[object, object, T]], *arguments: object) -> T:
        """Run a coroutine function there and return its result. When cancelled, waits until the function has ended."""
        task: asyncio.Task[object] | None = None
        is_given_up = False  # cancelled before it began, because the loop was blocked

        async def called() -> T:
            nonlocal task
            task = asyncio.current_task()
            assert task is not None
            self._called.add(task)
            task.add_done_callback(self._called.discard)
            if is_given_up:
                raise asyncio.CancelledError
            enter()
            return await function(*arguments)

        def give_up() -> None:
            if task is not None:
                task.cancel()

        result = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(called(), self.loop))
        result.add_done_callback(retrieve)  # the caller may have gone
        try:
            await asyncio.wait([result])
            return result.result()
        except asyncio.CancelledError:
            if not result.done():
                is_given_up = True
                self.post(give_up)
                await asyncio.wait([result])
            raise

    async def aclose(self, aclose: Callable[[], Coroutine[object, object, None]]) -> None:
        """Close the reward and stop the loop. Code that blocks it is abandoned."""

        async def closed() -> None:
            await cancel(self._called - {asyncio.current_task()})  # first, because they would reopen connections
            await aclose()
            await cancel(asyncio.all_tasks() - {asyncio.current_task()})

        closing = asyncio.ensure_future(self.call(closed))
        await asyncio.wait([closing], timeout=CLOSE_S)
        if closing.done():
            self.close()
            closing.result()
        else:
            closing.cancel()
            logger.error(f"{self.held_by() or 'The event loop of rewards does not close.'} It is abandoned.")

    def held_by(self) -> str:
        """Describe the code that blocks the loop by its current stack. Empty if the loop is idle."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        frames = [] if frame is None else [*traceback.walk_stack(frame)]
        modules = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in frames]
        foreign = max((place for place, module in enumerate(modules, start=1) if module not in _LOOPS), default=0)
        inwards = reversed(frames[:foreign])  # from the outermost custom frame inwards
        stack = ", ".join(f"{frame.f_code.co_name} at {frame.f_code.co_filename}:{line}" for frame, line in inwards)
        advice = "Expected `await` wherever it waits, or a function without `async`, which runs on its own thread."
        return stack and f"{stack} blocks the event loop of rewards. {advice}"
