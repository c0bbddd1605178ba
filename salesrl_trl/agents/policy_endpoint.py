"""Serves the policy in training as an OpenAI-compatible chat completions endpoint on loopback.

Owns the request and response formats, the episodes' keys, and the server's thread.
"""

import asyncio
import contextlib
import functools
import json
import logging
import resource
import secrets
import threading
import time
from collections.abc import Iterator

from aiohttp import web
from aiohttp.typedefs import Handler

from salesrl_trl.agents.chat_turns import AgentCalls, Message, Refused, Sequenced
from salesrl_trl.generation.engine_loop import GivenUp
from salesrl_trl.generation.sampler import is_deep
from salesrl_trl.ground.texts import encodable
from salesrl_trl.service.event_loop import THREADS

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024 * 1024
HEAD_S = 30.0  # timeout for the headers of a connection's next request; clients keep idle connections for 5 to 15 s
BODY_S = 60.0
CLOSE_S = 0.5  # applied twice: until open requests end, and until they are cancelled
_READ = {
    "model", "messages", "tools", "max_tokens", "max_completion_tokens", "user", "store", "metadata", "service_tier",
    "parallel_tool_calls", "prompt_cache_key", "stream", "stream_options",
}  # fmt: skip
"""Supported request fields, and fields without effect on the policy's answer."""
_USUAL = {"tool_choice": "auto", "response_format": {"type": "text"}, "n": 1, "logprobs": False}
"""Default values, which change nothing."""
_REFUSED = ("n", "logprobs", "top_logprobs", "stop")
"""Unsupported fields that an agent relies on to read the answer."""
_QUIET = logging.Logger("policy endpoint", logging.CRITICAL + 1)  # aiohttp logs malformed requests verbatim


class PolicyEndpoint:
    """A server on a free loopback port. Each episode has its own key, valid while the episode is open."""

    def __init__(self) -> None:
        self._episodes: dict[str, AgentCalls] = {}
        self._tell = functools.cache(logger.warning)  # logs each line once
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guarded])
        app.add_routes([web.post("/v1/chat/completions", self._complete)])
        self._runner = web.AppRunner(
            app, access_log=None, logger=_QUIET, handler_cancellation=True, keepalive_timeout=HEAD_S,
            shutdown_timeout=CLOSE_S,
        )  # fmt: skip
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="policy endpoint", daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        self.address = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def _listen(self) -> asyncio.Server:
        await self._runner.setup()
        return await self._loop.create_server(self._connection, "127.0.0.1", 0)

    def _connection(self) -> asyncio.BaseProtocol:
        """The handler of a new connection. Of more than half of the files that the process may open, the oldest are
        closed, those without a request first."""
        server, most = self._runner.server, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        assert server is not None
        opened = [each for each in server.connections if each.transport is not None]
        surplus = len(opened) + 1 - most if most > 0 else 0
        for oldest in sorted(opened, key=lambda each: each._request_in_progress)[: max(surplus, 0)]:
            oldest.force_close()
        return server()

    def close(self) -> None:
        """Stop within seconds, even if agents left requests open. Does nothing a second time."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._server.close)
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @contextlib.contextmanager
    def open(self, calls: AgentCalls) -> Iterator[str]:
        """Inside the block, requests with the yielded key belong to this episode."""
        key = f"episode-{secrets.token_urlsafe(32)}"
        self._episodes[key] = calls
        try:
            yield key
        finally:
            del self._episodes[key]

    def _calls(self, request: web.Request) -> AgentCalls | None:
        return self._episodes.get(request.headers.get("Authorization", "").removeprefix("Bearer "))

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Serve only open episodes' keys. Engine failures are kept for the trainer."""
        calls = self._calls(request)
        try:
            if calls is None:
                raise Refused("The key does not belong to a running episode.", code="invalid_api_key", status=401)
            return await handler(request)
        except Refused as refused:
            words, code, status = str(refused), refused.code, refused.status
        except (web.HTTPException, ConnectionError):
            raise
        except (Exception, GivenUp) as failure:
            words, code, status = "The policy no longer answers this episode.", "given_up", 410
            if calls is None or calls.error is None:  # the request's fault, limited to this episode
                words, code, status = f"The request can't be read: {type(failure).__name__}.", "invalid_request", 400
        if status == 400:
            self._tell(f"an episode's request is rejected: {words}")
        error = {"message": words, "type": "invalid_request_error", "param": None, "code": code}
        return web.json_response({"error": error}, status=status)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        calls, asked = self._calls(request), await _body(request)
        assert calls is not None
        if any(name not in _READ and value != _USUAL.get(name) for name, value in asked.items()):
            self._tell("ignoring sampling settings in episodes' requests: the policy samples with the run's own")
        started = await asyncio.wrap_future(THREADS.submit(calls.start, asked["messages"], asked.get("tools")))
        turn = await asyncio.wrap_future(THREADS.submit(calls.turn, started, asked["max_tokens"]))
        answer = _answer(calls, turn)
        calls.answered.append(turn)  # reached only if the client is still connected
        return await _streamed(request, answer) if asked.get("stream") is True else web.json_response(answer)


async def _streamed(request: web.Request, answer: Message) -> web.StreamResponse:
    """The whole answer as one event, followed by its token counts, for agents that request a stream."""
    usage, [choice] = answer.pop("usage"), answer.pop("choices")
    delta, answer["object"] = choice.pop("message"), "chat.completion.chunk"
    for place, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = place
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in ({**answer, "choices": [{**choice, "delta": delta}]}, {**answer, "choices": [], "usage": usage}):
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def _is_tool(tool: object) -> bool:
    match tool:
        case {"function": {"name": str(), **others}}:
            return isinstance(others.get("parameters") or {}, dict)
    return False


async def _body(request: web.Request) -> Message:
    try:
        async with asyncio.timeout(BODY_S):
            asked: object = await request.json()
    except (ValueError, LookupError, RecursionError, TimeoutError):  # LookupError: unknown charset
        asked = None
    if not isinstance(asked, dict) or is_deep(asked):
        raise Refused(f"The body is not a JSON object, is nested too deeply, or did not arrive within {BODY_S:g} s.")
    sent: Message = encodable(asked, "an agent's request")
    given = {name: value for name, value in sent.items() if value is not None and value != []}
    messages, most = given.get("messages"), given.get("max_completion_tokens", given.get("max_tokens"))
    tools = given.get("tools", [])
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise Refused("`messages`: expected a list of messages.")
    if not isinstance(tools, list) or not all(map(_is_tool, tools)):
        raise Refused("`tools`: expected functions, each with a `name`.")
    if most is not None and not (type(most) is int and most > 0):
        raise Refused("`max_tokens`: expected a number above 0.")
    for name in _REFUSED:
        if name in given and given[name] != _USUAL.get(name):
            raise Refused(
                f"`{name}`: unsupported. An answer is one whole turn without log-probs, up to its end token."
            )
    return {**given, "max_tokens": most}


def _answer(calls: AgentCalls, turn: Sequenced) -> Message:
    read, written = turn.messages[-1], turn.own
    prompt = len(turn.prompt_ids) + len(turn.ids) - written
    functions = [call.get("function", call) for call in read.get("tool_calls") or ()]
    message: Message = {"role": "assistant", "content": read["content"] or (None if functions else "")}
    if thought := read.get("reasoning_content"):
        message["reasoning_content"] = thought
    if functions:
        message["tool_calls"] = [
            {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {
                "name": function["name"], "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
            for function in functions
        ]  # fmt: skip
    end = "length" if turn.ids[-1] not in calls.form.ends else "tool_calls" if functions else "stop"
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": end}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written},
    }
