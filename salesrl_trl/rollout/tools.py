"""Calls of tools in the midst of a conversation: how they are made, and what a failed one means.

Owns `@tool`, the difference between an error of the policy and a failure of a service, and the counts of calls. TRL's
loop asks for calls; it gets a text, or an error that it tells the policy. Calls of one turn run at once.
"""

import asyncio
import functools
import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

from salesrl_trl.errors import ConfigError, ServiceError, ServiceTimeout
from salesrl_trl.names import TOOL_FIGURES
from salesrl_trl.reward.service.event_loop import deadline
from salesrl_trl.reward.service.http import service_error_of
from salesrl_trl.reward.service.transport import Transport
from salesrl_trl.reward.watched_loop import THREADS

F = TypeVar("F", bound=Callable[..., Any])
OnFailure = Literal["leave_out", "tell"]
_SETTINGS = "salesrl_tool"  # attribute of a function that has settings


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSettings:
    """How a tool is called: the arguments of `tool`."""

    transport: Transport | None = None
    deadline_s: float | None = None
    on_failure: OnFailure = "leave_out"


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(
    *, transport: Transport | None = None, deadline_s: float | None = 60.0, on_failure: OnFailure = "leave_out"
) -> Callable[[F], F]: ...
def tool(
    function: F | None = None,
    /,
    *,
    transport: Transport | None = None,
    deadline_s: float | None = 60.0,
    on_failure: OnFailure = "leave_out",
) -> F | Callable[[F], F]:
    """Say how a tool of TRL's `tools`, or a method of an environment, is called, and what its failure means.

    A service that fails is no error of the policy. By default such a conversation is left out of the update, with the
    failure's code as its reason. Everything else that the function raises is told to the policy, as by TRL:
    `{"error": ...}`.

    Args:
        transport (`Transport`, *optional*):
            Retries, limits, hedges, a breaker and the run's budget around each call. The call is made once when not
            given.
        deadline_s (`float`, *optional*, defaults to `60.0`):
            Seconds for a call, with its retries. `None` for no end.
        on_failure (`str`, *optional*, defaults to `"leave_out"`):
            `"leave_out"` leaves the conversation out. `"tell"` tells the policy the failure's code as an error.

    Raises `ConfigError` for another `on_failure`, or for seconds that are not positive.
    """
    if on_failure not in ("leave_out", "tell"):
        raise ConfigError(f"`on_failure` is {on_failure!r}. Expected `leave_out` or `tell`.")
    if deadline_s is not None and not deadline_s > 0:
        raise ConfigError(f"`deadline_s` of a tool is {deadline_s}. Expected seconds above 0, or `None`.")

    def with_settings(function: F) -> F:
        setattr(function, _SETTINGS, ToolSettings(transport=transport, deadline_s=deadline_s, on_failure=on_failure))
        return function

    return with_settings if function is None else with_settings(function)


class ToolCalls:
    """The calls of one batch, and their counts. `names` of all tools: counts have the same keys in every batch."""

    def __init__(self, names: Iterable[str]) -> None:
        self.under_way = 0
        self.counts: dict[str, dict[str, float]] = {name: dict.fromkeys(TOOL_FIGURES, 0.0) for name in names}

    def of(self, tools: Iterable[Callable[..., Any]], failed: Callable[[str], None]) -> "OwnTools":
        """The tools of one conversation as TRL's loop calls them. `failed` gets the reason code of a failed call that
        leaves the conversation out; the call answers with an empty text then."""
        return OwnTools({each.__name__: functools.partial(self._call, each, failed) for each in tools})

    async def _call(self, tool: Callable[..., Any], failed: Callable[[str], None], /, **arguments: Any) -> Any:
        settings: ToolSettings = getattr(tool, _SETTINGS, ToolSettings())
        counts = self.counts.setdefault(tool.__name__, dict.fromkeys(TOOL_FIGURES, 0.0))
        began = time.perf_counter()
        counts["calls"] += 1
        self.under_way += 1
        try:
            result = await _within(settings, f"tool_{tool.__name__}", tool, arguments)
        except ServiceError as error:
            counts["failures"] += 1
            if settings.on_failure == "tell":
                raise RuntimeError(error.code) from error
            failed(error.code)
            return ""
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # told to the policy, as by TRL
            counts["errors"] += 1
            raise error if isinstance(error, Exception) else RuntimeError(type(error).__name__) from error
        finally:
            self.under_way -= 1
            counts["seconds"] += time.perf_counter() - began
        return result


class OwnTools(dict[str, Callable[..., Any]]):
    """Tools by name, for TRL's loop. It has every name: one that is unknown raises what TRL raises for it, when its
    turn comes, so that results stand in the order of calls."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Callable[..., Any]:
        async def unknown(**arguments: object) -> None:
            raise ValueError(f"Tool {name} not found.")

        return unknown


async def _within(settings: ToolSettings, service: str, tool: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a tool. Raises a `ServiceError` where a service failed, and what the tool raised otherwise."""

    async def attempt() -> tuple[Any, BaseException | None]:
        try:
            if inspect.iscoroutinefunction(tool):
                return await tool(**arguments), None
            call: Future[Any] = THREADS.submit(lambda: tool(**arguments))
            return await asyncio.wrap_future(call), None
        except ServiceError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if (known := service_error_of(service, error)) is not None:
                raise known from error
            return None, error  # the policy's: nobody tries again

    made = attempt() if settings.transport is None else None
    late = asyncio.timeout(settings.deadline_s)
    try:
        async with late:
            with deadline(float("inf") if settings.deadline_s is None else settings.deadline_s):
                result, error = await (made or settings.transport.call(attempt))  # type: ignore[union-attr]
    except TimeoutError:
        if not late.expired():
            raise
        raise ServiceTimeout(f"{service} did not answer in {settings.deadline_s} s", f"{service}_timeout") from None
    if error is not None:
        raise error
    return result
