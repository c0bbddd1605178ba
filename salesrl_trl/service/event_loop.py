"""What belongs to an event loop: the clock of all waits for services, the deadline of a reward phase, and objects.

A deadline travels in a context variable, which every task that is started inside takes along. It cancels nothing: the
code that waits asks how long it may. The reward sets it, `transport` observes it. In the same way calls tell which
limit they wait for.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from salesrl_trl.errors import ServiceError

T = TypeVar("T")

CANCEL_GRACE_S = 1.0  # longest wait for tasks that were cancelled. After it they are left behind.
_END: ContextVar[float] = ContextVar("salesrl_trl_deadline", default=math.inf)
_WAITS_FOR: ContextVar[list[Callable[[], str]]] = ContextVar("salesrl_trl_waits_for")


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


@contextlib.contextmanager
def told_to(limits: list[Callable[[], str]]) -> Iterator[None]:
    """The limits that calls inside wait for are in this list while they do."""
    token = _WAITS_FOR.set(limits)
    try:
        yield
    finally:
        _WAITS_FOR.reset(token)


@contextlib.contextmanager
def waiting_for(limit: Callable[[], str]) -> Iterator[None]:
    """The running call waits for a limit; `limit` says which."""
    limits = _WAITS_FOR.get([])
    limits.append(limit)
    try:
        yield
    finally:
        limits.remove(limit)


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


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks of the running loop. Those that go on for `CANCEL_GRACE_S` all the same are left behind."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CANCEL_GRACE_S)


async def cancel_others() -> None:
    await cancel(asyncio.all_tasks() - {asyncio.current_task()})


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
