"""Tools of MCP servers, started by a command (stdio) or reached by a URL (streamable HTTP), through the official SDK.

    tools = mcp_tools("python examples/mcp_server.py")
    trainer = SalesGRPOTrainer(model, reward_funcs, args, rows, tools=tools)

Owns the sessions and what a result or an error of a server means. Retries belong to `service.transport`: each of its
attempts opens the session again if it was lost.
"""

import asyncio
import functools
import importlib.util
import json
import logging
import os
import shlex
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from salesrl_trl.agents.tools import CLOSE_S, OnFailure, Tool, UsedLoops, tool
from salesrl_trl.errors import BadServiceResponse, ConfigError, ServiceError, ServiceRejected, ServiceUnavailable
from salesrl_trl.service.event_loop import THREADS, cancel, is_cancelled, now
from salesrl_trl.service.statuses import address_fault, service_error_of
from salesrl_trl.service.transport import Transport

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult
    from mcp_types import Tool as Listed

    from salesrl_trl.agents.chat_turns import ForeignText

logger = logging.getLogger(__name__)
_tell = functools.cache(logger.warning)  # logs each line once

START_S = 60.0  # longest wait for a server to start, be initialised and list its tools
RESTART_S = 10.0  # calls wait this long for a server that was lost
MOST_CALLS = 64  # concurrent calls of one tool
MOST_ATTEMPTS = 3
MOST_PAGES = 100  # of a list of tools
ANSWERED = (-32601, -32602, -32603)  # JSON-RPC: unknown method, invalid parameters, internal error


class MCPServer:
    """One server. Each event loop has its own session, which its first call opens, so a training process has one.

    `env` and `headers` may hold keys, which are never logged.
    """

    def __init__(self, address: str, env: Mapping[str, str] | None, headers: Mapping[str, str] | None) -> None:
        self._env, self._headers = dict(env or {}), dict(headers or {})
        self.url = address if address.startswith(("http://", "https://")) else None
        self._command = [] if self.url else shlex.split(address)
        if self.url and (fault := address_fault(self.url)):
            raise ConfigError(f"an MCP server's URL contains {fault}. In Python, `mcp_tools` takes `headers`.")
        if not self.url and not self._command:
            raise ConfigError("an MCP server is empty. Expected `mcp:` followed by a command or a URL.")
        self.name = self.url or self._command[0]  # for messages: arguments may hold keys
        self._sessions: dict[asyncio.AbstractEventLoop, _Session] = {}  # for the next calls
        self._held = dict[asyncio.Task[None], _Session]()
        self._loops = UsedLoops()

    @asynccontextmanager
    async def session(self, *, is_quiet: bool) -> "AsyncIterator[Client]":
        """`is_quiet`: whether the process's stderr, and what the SDK logs of its stdout, is dropped, since servers log
        customers' texts."""
        import httpx2
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        if is_quiet:
            logging.getLogger("mcp.client").setLevel(logging.CRITICAL)
        async with AsyncExitStack() as stack:
            if self.url is None:
                errors = sys.__stderr__ or sys.stderr
                if is_quiet:
                    descriptor = os.open(os.devnull, os.O_WRONLY)
                    errors = stack.enter_context(os.fdopen(descriptor, "w"))
                command = StdioServerParameters(command=self._command[0], args=self._command[1:], env=self._env)
                transport = stdio_client(command, errors)
            else:
                limit = httpx2.Timeout(START_S, read=None)
                http = await stack.enter_async_context(httpx2.AsyncClient(headers=self._headers, timeout=limit))
                transport = streamable_http_client(self.url, http_client=http)
            yield await stack.enter_async_context(Client(transport))

    async def listed(self) -> "list[Listed]":
        """The server's tools, from a session of its own. Calls none."""
        from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

        async with asyncio.timeout(START_S), self.session(is_quiet=False) as client:
            if client.protocol_version in HANDSHAKE_PROTOCOL_VERSIONS:  # later ones have no `ping`
                await client.session.send_ping()
            tools: list[Listed] = []
            cursor = None
            for _ in range(MOST_PAGES):
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                if not (cursor := page.next_cursor):
                    return tools
        raise BadServiceResponse(f"the MCP server {self.name} lists its tools on more than {MOST_PAGES} pages")

    async def call(self, service: str, name: str, arguments: dict[str, object], *, again: bool) -> "CallToolResult":
        """One call in the running loop's session. `again`: whether it may be repeated once it was sent.

        Raises `ServiceError`, by `service` in its code.
        """
        from mcp import MCPError
        from pydantic import ValidationError

        self._loops.note()
        session = self._next()
        try:
            client = await asyncio.shield(session.client)  # others may wait for it too
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            raise failure_of(service, error) from error
        began = now()
        try:
            session.calls += 1
            result = await client.call_tool(name, arguments)
            session.answered = now()
            return result
        except asyncio.CancelledError:
            if session.answered < began:  # nothing was answered meanwhile: it may hang
                self._leave(session)
            raise
        except MCPError as error:
            if error.code in ANSWERED:
                session.answered = now()
                text = f"{service}: the MCP server rejects a call that fits its own schema ({error.code})"
                raise ServiceRejected(text, f"{service}_refused") from None
            failure: ServiceError = ServiceUnavailable(f"{service}: connection lost", f"{service}_unavailable")
            self._leave(session)
        except (RuntimeError, ValidationError):  # the SDK's, for a result unlike the schema or the protocol
            session.answered = now()
            text = f"{service}: the result does not fit the schema that the MCP server lists"
            raise BadServiceResponse(text, f"{service}_bad_result") from None
        except Exception as error:
            failure = failure_of(service, error)
            self._leave(session)
        finally:
            session.calls -= 1
            if self._sessions.get(session.loop) is not session and not session.calls:
                session.ended.set()
        failure.worth_retrying = failure.worth_retrying and again
        raise failure

    def _next(self) -> "_Session":
        """The session for a new call on the running loop."""
        loop = asyncio.get_running_loop()
        if (session := self._sessions.get(loop)) is None:
            session = self._sessions[loop] = _Session(loop)
            task = asyncio.create_task(self._hold(session))
            self._held[task] = session
            task.add_done_callback(self._held.pop)
        return session

    async def _hold(self, session: "_Session") -> None:
        """Open a session and keep it: the SDK enters and leaves it in one task."""
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(START_S):
                    client = await stack.enter_async_context(self.session(is_quiet=True))
                session.client.set_result(client)
                await session.ended.wait()
        except (Exception, asyncio.CancelledError) as error:
            if not session.client.done():
                session.client.set_exception(cause_of(error))
                session.client.exception()  # those who waited for it may have gone
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._leave(session)

    def _leave(self, session: "_Session") -> None:
        """The next call opens another session; calls in flight keep this one."""
        if self._sessions.get(session.loop) is session:
            del self._sessions[session.loop]

    def close(self) -> None:
        """Close its sessions and end its processes. From any thread but the loops' own."""
        self._loops.close(self._aclose)

    async def _aclose(self) -> None:
        loop = asyncio.get_running_loop()
        held = {task: session for task, session in [*self._held.items()] if session.loop is loop}
        for session in held.values():
            session.ended.set()
        if held:
            await asyncio.wait(held, timeout=CLOSE_S / 2)  # the SDK sends SIGTERM after 2 s, SIGKILL after 4
        await cancel(held)


class _Session:
    """One session with a server, on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.client: asyncio.Future[Client] = loop.create_future()
        self.ended = asyncio.Event()
        self.calls = 0  # in flight
        self.answered = 0.0  # when it last answered, by the loop's clock


class MCPTool(dict[str, Any]):
    """A server's tool: the JSON schema that the server lists, which TRL passes to the chat template as it is, and an
    async function."""

    def __init__(self, server: MCPServer, listed: "Listed", deadline_s: float, on_failure: OnFailure) -> None:
        from jsonschema.validators import validator_for
        from referencing import Registry

        parameters = listed.input_schema
        super().__init__(
            type="function",
            function={"name": listed.name, "description": listed.description or "", "parameters": parameters},
        )
        self.__name__, self.server, self._service = listed.name, server, f"tool_{listed.name}"
        kind = validator_for(parameters)
        kind.check_schema(parameters)
        self._validator = kind(parameters, registry=Registry())  # an empty registry: it fetches nothing
        hints = listed.annotations
        self._again = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
        transport = Transport(
            self._service, max_concurrency=MOST_CALLS, attempt_timeout_s=deadline_s / (2 if self._again else 1),
            max_attempts=MOST_ATTEMPTS, hedge_fraction=0.0, outage_patience_s=min(RESTART_S, deadline_s / 2),
        )  # fmt: skip
        transport.notes = False  # a replay answers the call as a whole
        tool(transport=transport, deadline_s=deadline_s, on_failure=on_failure)(self)

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    async def __call__(self, **arguments: object) -> str:
        """The result's text. Raises `ServiceError`, or another exception for an error that the policy is told."""
        try:
            faults = sorted(error.message for error in self._validator.iter_errors(arguments))
        except Exception as error:  # a `$ref` to elsewhere or to itself: not the policy's error
            text = f"{self._service}: the MCP server lists a schema that cannot be checked ({type(error).__name__})"
            _tell(text)
            raise BadServiceResponse(text, f"{self._service}_bad_schema") from None
        if faults:
            raise ValueError(f"The arguments don't fit the tool's schema: {faults[0]}")
        result = await self.server.call(self._service, self.__name__, arguments, again=self._again)
        return text_of(self._service, result)


def mcp_tools(
    server: str,
    /,
    *,
    env: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    deadline_s: float = 60.0,
    on_failure: OnFailure = "leave_out",
) -> list[Tool]:
    """The tools of an MCP server, for TRL's `tools`. Opens a session to list them, and calls none.

    Args:
        server (`str`):
            The command that starts it, e.g. `"python examples/mcp_server.py"`, which isn't run by a shell, or its URL.
        env (`Mapping[str, str]`, *optional*):
            Environment variables for the command, e.g. keys. By default the server inherits `PATH` and `HOME`, not
            this process's keys.
        headers (`Mapping[str, str]`, *optional*):
            Headers of each request to the URL.
        deadline_s (`float`, *optional*, defaults to `60.0`):
            Timeout of a call in seconds, retries included.
        on_failure (`str`, *optional*, defaults to `"leave_out"`):
            As of `@tool`.

    Raises `ConfigError` if the SDK is missing, the server doesn't start or answer, or a tool's schema is invalid.
    """
    if importlib.util.find_spec("mcp") is None:
        from salesrl_trl.wiring.part import lacking  # imports torch

        raise lacking("agents", "a tool of an MCP server", "mcp")
    made = MCPServer(server, env, headers)
    try:
        listed = THREADS.submit(asyncio.run, made.listed()).result()  # in a thread: a notebook's loop runs in this one
    except Exception as error:
        failed = failure_of("mcp", cause_of(error))
        raise ConfigError(
            f"the MCP server {made.name} did not list its tools: {failed}. Expected an MCP server, by its command or "
            "the URL of its streamable HTTP endpoint."
        ) from error
    tools = []
    for each in sorted(listed, key=attrgetter("name")):  # equal on all ranks
        try:
            tools.append(MCPTool(made, each, deadline_s, on_failure))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"the MCP server {made.name} lists {each.name!r} with an invalid schema.") from error
    if not tools:
        raise ConfigError(f"the MCP server {made.name} lists no tools.")
    return [*tools]


def neutralise(tools: Iterable[Tool], foreign: "ForeignText") -> None:
    """Break up turn marks in these tools' schemas, which are rendered into every prompt."""
    for each in tools:
        if isinstance(each, MCPTool):
            each.update(foreign.without(dict(each)))


def close(tools: Iterable[Tool]) -> None:
    """End the sessions of these tools' servers."""
    for server in {each.server for each in tools if isinstance(each, MCPTool)}:
        server.close()


def text_of(service: str, result: "CallToolResult") -> str:
    """Raises `BadServiceResponse` if there is other content than text, and `RuntimeError` for a tool's error."""
    others = sorted({part.type for part in result.content} - {"text"})
    if others:
        text = f"{service} returned content of the type {', '.join(others)}: only text is supported."
        _tell(text)
        raise BadServiceResponse(text, f"{service}_no_text")
    text = "\n".join(part.text for part in result.content if part.type == "text")
    if not result.content and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    if result.is_error:
        raise RuntimeError(text)
    return text


def failure_of(service: str, error: BaseException) -> ServiceError:
    """The failure to open a session or to send a call."""
    error = cause_of(error)
    known = error if isinstance(error, ServiceError) else service_error_of(service, error)
    return known or ServiceUnavailable(f"{service}: no session ({type(error).__name__})", f"{service}_unavailable")


def cause_of(error: BaseException) -> BaseException:
    """The first error of a task group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
