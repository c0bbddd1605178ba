"""A call's answer with its seconds, or its error: for calls that may fail, such as those of a warm-up."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from salesrl_trl.errors import ServiceError
from salesrl_trl.reward.service.deadline import now

T = TypeVar("T")


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
