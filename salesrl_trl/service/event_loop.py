"""Event loops: the clock of all waits for services, the deadline of a reward, objects, and threads with a loop.

A deadline travels in a context variable, which every task that is started inside takes along. It cancels nothing: the
code that waits asks how long it may. Code that does not give its loop back is named: deadlines lie on another loop.
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

CANCEL_GRACE_S = 1.0  # longest wait for tasks that were cancelled. After it they are left behind.
CLOSE_S = 8.0  # longest wait for a reward to close what belongs to its loop
_LOOPS = ("salesrl_trl", "asyncio", "threading", "contextvars", "selectors")  # through which a loop calls other code
_END: ContextVar[float] = ContextVar("salesrl_trl_deadline", default=math.inf)


def now() -> float:
    """Seconds on the running event loop's clock: `time.monotonic`, or virtual in tests."""
    return asyncio.get_running_loop().time()


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Everything inside has to end within `seconds`. An outer deadline that ends earlier stays in force."""
    token = _END.set(min(_END.get(), now() + seconds))
    try:
        yield
    finally:
        _END.reset(token)


def remaining_s() -> float:
    """Seconds left until the deadline: never below 0, and infinite without a deadline."""
    return max(_END.get() - now(), 0.0)


async def clocked(call: Callable[[], Awaitable[T]]) -> tuple[T, float] | ServiceError:
    """The answer and its seconds, or the error. Any other exception becomes a `ServiceError`: other ranks wait."""
    started = now()
    try:
        answer = await call()
    except ServiceError as error:
        return error
    except Exception as error:
        name = type(error).__name__
        return ServiceError(f"the call raised {name}", f"raised_{name}")
    return answer, now() - started


async def seconds_or_error(call: Callable[[], Awaitable[object]]) -> float | ServiceError:
    result = await clocked(call)
    return result if isinstance(result, ServiceError) else result[1]


def retrieve(future: asyncio.Future[T]) -> None:
    """Look at an error that perhaps nobody awaits: asyncio would log it."""
    if not future.cancelled():
        future.exception()


async def cancel(tasks: Iterable[asyncio.Future[T]]) -> None:
    """Cancel tasks of the running loop. Those that go on for `CANCEL_GRACE_S` all the same are left behind."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CANCEL_GRACE_S)


class PerLoop(Generic[T]):
    """One object for each event loop: connections, events and tasks break when a second loop uses them."""

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
        self._submitted: set[object] = set()  # a coroutine that nobody waits for may be dropped
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:  # its thread keeps what it serves
        self.loop.run_forever()

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function on the loop, unless it has ended. Does not wait."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def submit(self, call: Coroutine[object, object, T]) -> "Future[T]":
        """Run a coroutine on the loop. Does not wait."""
        submitted = asyncio.run_coroutine_threadsafe(call, self.loop)
        self._submitted.add(submitted)
        submitted.add_done_callback(self._submitted.discard)
        return submitted

    def run(self, call: Coroutine[object, object, T]) -> T:
        """The result of a coroutine on the loop. Where the wait is interrupted, it is cancelled."""
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
    """Calls of a user's code on a loop of their own, which it may hold up. From one other loop."""

    def __init__(self) -> None:
        super().__init__("reward calls")
        self._called: set[asyncio.Task[object]] = set()  # on the loop
        self.loop.set_default_executor(THREADS)  # for `asyncio.to_thread`

    async def call(self, function: Callable[..., Coroutine[object, object, T]], *arguments: object) -> T:
        """The result of a coroutine function there. A call that is cancelled waits until the function has ended."""
        task: asyncio.Task[object] | None = None
        is_given_up = False  # before it began, because the loop was held up

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
        result.add_done_callback(retrieve)  # the caller may be gone
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
        """Close the reward and end the loop. Code that holds it up is left behind."""

        async def closed() -> None:
            await cancel(self._called - {asyncio.current_task()})  # before: they would open connections anew
            await aclose()
            await cancel(asyncio.all_tasks() - {asyncio.current_task()})

        closing = asyncio.ensure_future(self.call(closed))
        await asyncio.wait([closing], timeout=CLOSE_S)
        if closing.done():
            self.close()
            closing.result()
        else:
            closing.cancel()
            logger.error(f"{self.held_by() or 'The event loop of rewards does not close.'} It is left behind.")

    def held_by(self) -> str:
        """What does not give the loop back, in words: where it is now. Empty if the loop is idle."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        frames = [] if frame is None else [*traceback.walk_stack(frame)]
        modules = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in frames]
        foreign = max((place for place, module in enumerate(modules, start=1) if module not in _LOOPS), default=0)
        inwards = reversed(frames[:foreign])  # from the outermost one of a user's on
        stack = ", ".join(f"{frame.f_code.co_name} at {frame.f_code.co_filename}:{line}" for frame, line in inwards)
        advice = "Expected `await` wherever it waits, or a function without `async`, which gets a thread of its own."
        return stack and f"{stack} does not give the event loop of rewards back. {advice}"
