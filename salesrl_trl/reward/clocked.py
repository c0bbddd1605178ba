"""A call with its seconds, or with what went wrong: for calls whose failure is no end, such as those of a warm-up."""

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from salesrl_trl.errors import ServiceError

T = TypeVar("T")


async def clocked(call: Callable[[], Awaitable[T]]) -> tuple[T, float] | ServiceError:
    """The answer and its seconds, or the error. A fault in somebody's code is an error of the service too, because
    other ranks wait for this one."""
    started = time.perf_counter()
    try:
        answer = await call()
    except ServiceError as error:
        return error
    except Exception as error:
        name = type(error).__name__
        return ServiceError(f"the call raised {name}", f"raised_{name}")
    return answer, time.perf_counter() - started


async def seconds_or_error(call: Callable[[], Awaitable[object]]) -> float | ServiceError:
    """The call's seconds, or the error."""
    result = await clocked(call)
    return result if isinstance(result, ServiceError) else result[1]
