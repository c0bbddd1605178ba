"""Makes tool calls within a conversation and interprets their failures.

Owns `@tool`, the distinction between policy errors and service failures, and the call counts.
"""

import asyncio
import contextlib
import inspect
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from salesrl_trl.errors import ConfigError, ServiceError, ServiceTimeout
from salesrl_trl.ground.texts import encodable
from salesrl_trl.names import TOOL_FIGURES
from salesrl_trl.record.reader import as_json
from salesrl_trl.reward.stage_times import FaultLog
from salesrl_trl.service.event_loop import CANCEL_GRACE_S, THREADS, deadline, is_cancelled
from salesrl_trl.service.statuses import service_error_of
from salesrl_trl.service.transport import Transport
from salesrl_trl.telemetry.completion_record import CallNote, CompletionRecord, noted_in

if TYPE_CHECKING:
    from salesrl_trl.judged.rag_client import RagAnswers
    from salesrl_trl.reward.scorer import Scorer

Tool = Callable[..., object]
F = TypeVar("F", bound=Tool)
OnFailure = Literal["leave_out", "tell"]
T = TypeVar("T")
CLOSE_S = 10.0  # longest wait for connections and sessions to close
_SETTINGS = "salesrl_tool"  # attribute that holds a function's settings
_faults = FaultLog()


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSettings:
    transport: Transport | None = None
    deadline_s: float | None = None
    on_failure: OnFailure = "leave_out"
    counted: list[Transport]
    """Transports whose traffic counts as the tool's: `transport`, or those the tool uses internally."""
    service: str | None = None  # its name in records and reason codes; by default `tool_` and the function's name

    @classmethod
    def of(cls, tool: Tool) -> "ToolSettings":
        return getattr(tool, _SETTINGS, None) or cls(counted=[])

    def name_of(self, tool: Tool) -> str:
        return self.service or f"tool_{tool.__name__}"


def tool(
    function: F | None = None,
    /,
    *,
    transport: Transport | None = None,
    deadline_s: float | None = 60.0,
    on_failure: OnFailure = "leave_out",
    counted: Sequence[Transport] = (),
    service: str | None = None,
) -> Any:
    """Configure how a tool from TRL's `tools`, or an environment's method, is called and how failures are handled.

    A failed service is not the policy's error: by default the conversation is excluded from the update, with the
    failure's code as its reason. Any other exception reaches the policy as `{"error": ...}`, as in TRL.

    Args:
        transport (`Transport`, *optional*):
            Adds retries, limits, hedges, a circuit breaker and the run's budget to each call. Without it, each call is
            made once.
        deadline_s (`float`, *optional*, defaults to `60.0`):
            Timeout of a call in seconds, retries included. `None` disables it.
        on_failure (`str`, *optional*, defaults to `"leave_out"`):
            `"leave_out"` excludes the conversation. `"tell"` returns the failure's code to the policy as an error.
        counted (`Sequence[Transport]`, *optional*):
            Transports that the function uses itself, whose traffic counts as the tool's.
        service (`str`, *optional*):
            Name in records and reason codes. Defaults to `tool_` and the function's name.

    Raises `ConfigError` for an invalid `on_failure` or `deadline_s`.
    """
    if on_failure not in ("leave_out", "tell"):
        raise ConfigError(f"`on_failure` is {on_failure!r}. Expected `leave_out` or `tell`.")
    if deadline_s is not None and not deadline_s > 0:
        raise ConfigError(f"`deadline_s` of a tool is {deadline_s}. Expected seconds above 0, or `None`.")

    def with_settings(function: F) -> F:
        every = [*counted] if transport is None else [*counted, transport]
        vars(function)[_SETTINGS] = ToolSettings(
            transport=transport, deadline_s=deadline_s, on_failure=on_failure, counted=every, service=service
        )
        return function

    return with_settings if function is None else with_settings(function)


@dataclass(kw_only=True, slots=True)
class ConversationNotes:
    """Notes on one conversation, shared by its thread and the loop that runs its tools."""

    record: CompletionRecord | None = None  # receives its calls, with arguments and results; `None`: not recorded
    failed: str | None = None
    """Reason code of the failed call that excludes it."""
    turns: int = 0


class ToolCalls:
    """The calls of one batch and their counts, keyed by all tools' `names` in every batch. With `replay`, calls are
    answered from a record."""

    def __init__(self, names: Iterable[str], replay: "Scorer | None" = None) -> None:
        self.stopped: str | None = None  # reason code of refused calls; `None` while calls are made
        self._tasks: set[asyncio.Task[object]] = set()
        self.counts: dict[str, dict[str, float]] = {name: dict.fromkeys(TOOL_FIGURES, 0.0) for name in names}
        self._replay = replay

    @property
    def under_way(self) -> int:
        return len(self._tasks)

    def cut_off(self, reason: str) -> None:
        """Fail running and later calls with this reason. Thread-safe."""
        self.stopped = reason
        for task in list(self._tasks):
            task.get_loop().call_soon_threadsafe(task.cancel)

    async def ended(self) -> None:
        """Wait for calls that were cut off."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CANCEL_GRACE_S)

    async def call(self, tool: Tool, notes: ConversationNotes, arguments: Mapping[str, object]) -> object:
        """Make a call. A failure that excludes the conversation returns an empty text and is noted in `notes`."""
        settings = ToolSettings.of(tool)
        counts = self.counts.setdefault(tool.__name__, dict.fromkeys(TOOL_FIGURES, 0.0))
        began = time.perf_counter()
        task = asyncio.current_task()
        assert task is not None
        counts["calls"] += 1
        self._tasks.add(task)
        try:
            if self.stopped is not None:
                raise asyncio.CancelledError
            return await self._noted(settings, tool, notes, arguments)
        except asyncio.CancelledError:
            if self.stopped is None:
                raise
            notes.failed = notes.failed or self.stopped
            return ""
        except ServiceError as error:
            counts["failures"] += 1
            if settings.on_failure == "tell":
                raise RuntimeError(error.code) from error
            notes.failed = notes.failed or error.code
            return ""
        except Exception:  # reaches the policy, as in TRL
            counts["errors"] += 1
            raise
        finally:
            self._tasks.discard(task)
            counts["seconds"] += time.perf_counter() - began

    async def required(
        self, tool: Tool, notes: ConversationNotes, arguments: Mapping[str, object], read: Callable[[Any], T]
    ) -> T | None:
        """Make a call whose every error excludes the conversation, also one of `read`, which gets the result. `None`
        after a failure or for a result of `None`."""
        try:
            result = await self.call(tool, notes, arguments)
            return None if result is None or notes.failed is not None else read(result)
        except Exception as error:
            service = ToolSettings.of(tool).name_of(tool)
            _faults.log(service, error)
            notes.failed = f"{service}_raised_{type(error).__name__}"
            return None

    async def _noted(
        self, settings: ToolSettings, tool: Tool, notes: ConversationNotes, arguments: Mapping[str, object]
    ) -> object:
        """Call the tool, or replay its recorded call, and note it in the conversation's record."""
        service, asked = settings.name_of(tool), as_json(arguments, sort_keys=True)
        turn, content = f"turn {notes.turns}", asked.encode(errors="replace")
        with noted_in(notes.record), CallNote(service, turn, content, stays=True) as note:
            try:
                known = None if self._replay is None else await self._replay.recorded_call(service, asked)
                if known is None:
                    result = await _within(settings, service, tool, arguments)
                else:
                    result, failure = known
                    if failure and result is None:
                        raise ServiceError(f"{service} failed in the recorded run ({failure})", failure)
                    if failure:
                        raise RuntimeError(result)
            except ServiceError:
                raise
            except Exception as error:
                words = str(error)
                note.answer = (told := encodable(words, f"an error of {service}")).encode()
                if told is not words:  # a replay raises this text
                    raise RuntimeError(told) from error
                raise
            if not isinstance(result, list):  # a list holds message parts, such as images
                note.answer = encodable(str(result), f"a result of {service}").encode()
        return result


async def _within(settings: ToolSettings, service: str, tool: Tool, arguments: Mapping[str, object]) -> object:
    """Call a tool. Raises `ServiceError` for a failed service, else the tool's own exception."""

    async def attempt() -> tuple[object, Exception | None]:
        try:
            call: object = tool if inspect.isroutine(tool) else type(tool).__call__.__get__(tool)
            if inspect.iscoroutinefunction(call):
                return await call(**arguments), None
            return await asyncio.wrap_future(THREADS.submit(tool, **arguments)), None
        except ServiceError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            if (known := service_error_of(service, error)) is not None:
                raise known from error
            own = error if isinstance(error, Exception) else RuntimeError(type(error).__name__)
            return None, own  # the policy's error: not retried

    late, transport = asyncio.timeout(settings.deadline_s), settings.transport
    try:
        async with late:
            with deadline(float("inf") if settings.deadline_s is None else settings.deadline_s):
                result, error = await (attempt() if transport is None else transport.call(attempt))
    except TimeoutError:
        if not late.expired():
            raise
        raise ServiceTimeout(f"{service} did not answer in {settings.deadline_s} s", f"{service}_timeout") from None
    if error is not None:
        raise error
    return result


async def drain_traffic(tools: Iterable[Tool]) -> dict[str, Counter[str]]:
    """Traffic of the tools' transports since the last call, by service. Returns unused budget. Runs on the event loop
    of the calls."""
    traffic: dict[str, Counter[str]] = {}
    for transport in dict.fromkeys(transport for tool in tools for transport in ToolSettings.of(tool).counted):
        traffic.setdefault(transport.service, Counter()).update(transport.drain_traffic())
        if transport.budget is not None:
            transport.budget.settle()
    return traffic


class UsedLoops(set[asyncio.AbstractEventLoop]):
    """The event loops of those who use a service: each trainer has one."""

    def note(self) -> None:
        self.add(asyncio.get_running_loop())

    def close(self, aclose: Callable[[], Coroutine[object, object, None]]) -> None:
        """Call `aclose` on each loop. From any thread but the loops' own."""
        for loop in [*self]:
            if loop.is_running():
                with contextlib.suppress(TimeoutError):
                    asyncio.run_coroutine_threadsafe(aclose(), loop).result(CLOSE_S)
        self.clear()


class Search:
    """Provides the built-in tool `search` as `function`. It sends the query to the 8B endpoint and returns passages to
    the policy. Repeated and concurrent equal queries share one request, as in the reward.

    `deadline_s` covers a call with its retries. An empty or non-text query is the policy's error.
    """

    def __init__(self, *, deadline_s: float) -> None:
        self._rag: RagAnswers | None = None
        self._loops = UsedLoops()

        async def search(query: str) -> str:
            """Searches the knowledge base.

            Args:
                query: What to look for, in a few words.

            Returns:
                The passages that fit best, a paragraph each.
            """
            if not isinstance(query, str) or not query.strip():
                raise ValueError("`query` is empty or not a text.")
            assert self._rag is not None, "`connect` was not called"
            self._loops.note()
            answer = await self._rag.search(query)
            return "\n\n".join(passage.text for passage in answer.passages) or answer.text

        self.function: Tool = tool(deadline_s=deadline_s)(search)

    def connect(self, rag: "RagAnswers") -> None:
        """Use this service. Its 8B transport provides retries, limits and counts."""
        self._rag = rag
        ToolSettings.of(self.function).counted[:] = [rag.backend.transports["rag_8b"]]

    def close(self) -> None:
        rag, self._rag = self._rag, None
        if rag is not None:
            self._loops.close(rag.aclose)
