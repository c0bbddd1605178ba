"""Calls of tools in the midst of a conversation: how they are made, and what a failed one means.

Owns `@tool`, the difference between an error of the policy and a failure of a service, and the counts of calls.
"""

import asyncio
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from salesrl_trl.errors import ConfigError, ServiceError, ServiceTimeout
from salesrl_trl.ground.texts import encodable
from salesrl_trl.names import TOOL_FIGURES
from salesrl_trl.record.reader import as_json
from salesrl_trl.service.event_loop import THREADS, deadline
from salesrl_trl.service.statuses import service_error_of
from salesrl_trl.service.transport import Transport
from salesrl_trl.telemetry.completion_record import CallNote, CompletionRecord, noted_in

if TYPE_CHECKING:
    from salesrl_trl.judged.rag_client import RagAnswers
    from salesrl_trl.reward.scorer import Scorer

Tool = Callable[..., object]
F = TypeVar("F", bound=Tool)
OnFailure = Literal["leave_out", "tell"]
_SETTINGS = "salesrl_tool"  # attribute of a function that has settings


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSettings:
    transport: Transport | None = None
    deadline_s: float | None = None
    on_failure: OnFailure = "leave_out"
    counted: list[Transport]
    """Those whose traffic is the tool's: `transport`, or what the tool itself calls by."""

    @classmethod
    def of(cls, tool: Tool) -> "ToolSettings":
        return getattr(tool, _SETTINGS, None) or cls(counted=[])


def tool(
    function: F | None = None,
    /,
    *,
    transport: Transport | None = None,
    deadline_s: float | None = 60.0,
    on_failure: OnFailure = "leave_out",
) -> Any:
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
        counted = [] if transport is None else [transport]
        vars(function)[_SETTINGS] = ToolSettings(
            transport=transport, deadline_s=deadline_s, on_failure=on_failure, counted=counted
        )
        return function

    return with_settings if function is None else with_settings(function)


@dataclass(kw_only=True, slots=True)
class ConversationNotes:
    """What is noted of one conversation, by the thread that goes through it and the loop on which its tools run."""

    record: CompletionRecord | None = None  # gets its calls, with arguments and results. `None`: they are not recorded
    failed: str | None = None
    """The reason code of the failed call that leaves it out."""
    turns: int = 0


class ToolCalls:
    """The calls of one batch, and their counts, which have the same keys in every batch: `names` of all tools. With
    `replay`, a record takes the place of calls."""

    def __init__(self, names: Iterable[str], replay: "Scorer | None" = None) -> None:
        self.stopped: str | None = None  # the reason code of calls that begin now: none is made. `None`: they are.
        self._tasks: set[asyncio.Task[object]] = set()
        self.counts: dict[str, dict[str, float]] = {name: dict.fromkeys(TOOL_FIGURES, 0.0) for name in names}
        self._replay = replay

    @property
    def under_way(self) -> int:
        return len(self._tasks)

    def cut_off(self, reason: str) -> None:
        """Make no more calls: those under way and all later ones fail with this reason. From any thread."""
        self.stopped = reason
        for task in list(self._tasks):
            task.get_loop().call_soon_threadsafe(task.cancel)

    async def call(self, tool: Tool, notes: ConversationNotes, arguments: Mapping[str, object]) -> object:
        """The result of a call. One that fails and leaves the conversation out has an empty text; `notes` have its
        reason."""
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
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # told to the policy, as by TRL
            counts["errors"] += 1
            raise error if isinstance(error, Exception) else RuntimeError(type(error).__name__) from error
        finally:
            self._tasks.discard(task)
            counts["seconds"] += time.perf_counter() - began

    async def _noted(
        self, settings: ToolSettings, tool: Tool, notes: ConversationNotes, arguments: Mapping[str, object]
    ) -> object:
        """`_within`, or what a record has in its place, noted in the conversation's record."""
        service, asked = f"tool_{tool.__name__}", as_json(arguments, sort_keys=True)
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
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                if not isinstance(error, ServiceError):
                    words = str(error) if isinstance(error, Exception) else type(error).__name__
                    note.answer = (told := encodable(words, f"an error of {service}")).encode()
                    if told is not words:  # a replay raises this text
                        raise RuntimeError(told) from error
                raise
            if not isinstance(result, list):  # of parts of a message, such as pictures
                note.answer = encodable(str(result), f"a result of {service}").encode()
        return result


async def _within(settings: ToolSettings, service: str, tool: Tool, arguments: Mapping[str, object]) -> object:
    """Call a tool. Raises a `ServiceError` where a service failed, and what the tool raised otherwise."""

    async def attempt() -> tuple[object, BaseException | None]:
        try:
            if inspect.iscoroutinefunction(tool):
                return await tool(**arguments), None
            return await asyncio.wrap_future(THREADS.submit(tool, **arguments)), None
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


async def drain_traffic(tools: Iterable[Tool]) -> dict[str, Counter[str]]:
    """The traffic of all transports of tools since the last time, by service. Budgets get back what is not spent. On
    the event loop of their calls."""
    traffic: dict[str, Counter[str]] = {}
    for transport in dict.fromkeys(transport for tool in tools for transport in ToolSettings.of(tool).counted):
        traffic.setdefault(transport.service, Counter()).update(transport.drain_traffic())
        if transport.budget is not None:
            transport.budget.settle()
    return traffic


class Search:
    """Makes the packaged tool `search`: `function`. It asks the 8B endpoint with a query alone, and tells the policy
    the passages. What was asked before, or is under way, is not asked again, as for the reward.

    `deadline_s` is for a call with its retries. An empty query, or one that is no text, is the policy's error.
    """

    def __init__(self, *, deadline_s: float) -> None:
        self._rag: RagAnswers | None = None
        self._loops = set[asyncio.AbstractEventLoop]()  # each trainer has one

        async def search(query: str) -> str:
            """Searches the knowledge base.

            Args:
                query: What to look for, in a few words.

            Returns:
                The passages that fit best, a paragraph each.
            """
            if not isinstance(query, str) or not query.strip():
                raise ValueError("`query` is empty or no text.")
            assert self._rag is not None, "`connect` comes first"
            self._loops.add(asyncio.get_running_loop())
            answer = await self._rag.search(query)
            return "\n\n".join(passage.text for passage in answer.passages) or answer.text

        self.function: Tool = tool(deadline_s=deadline_s)(search)

    def connect(self, rag: "RagAnswers") -> None:
        """Ask this service from now on. The transport of its 8B endpoint has retries, limits and counts."""
        self._rag = rag
        ToolSettings.of(self.function).counted[:] = [rag.backend.transports["rag_8b"]]

    def close(self) -> None:
        rag, self._rag = self._rag, None
        for loop in self._loops:
            if rag is not None and loop.is_running():
                asyncio.run_coroutine_threadsafe(rag.aclose(), loop).result()
