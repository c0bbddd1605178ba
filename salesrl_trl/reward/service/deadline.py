"""The clock of all waits for services, and one deadline for everything that is done on behalf of a reward phase.

Owns the clock, the moment at which a reward phase ends, and how that moment travels: in a context variable, which
every task that is started inside takes along. Cancels nothing: the code that waits asks how long it may. A warm-up and
a preflight time their calls here.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from salesrl_trl.errors import ServiceError

T = TypeVar("T")

_END: ContextVar[float] = ContextVar("salesrl_trl_deadline", default=math.inf)


def now() -> float:
    """Seconds on the running event loop's clock. This clock is `time.monotonic`, unless a test hands in a loop whose
    time is virtual: then waits and deadlines pass without waiting."""
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
    """The answer and its seconds, or the error. Any other exception becomes a `ServiceError`, because other ranks
    wait for this one."""
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
    """The call's seconds, or the error."""
    result = await clocked(call)
    return result if isinstance(result, ServiceError) else result[1]
