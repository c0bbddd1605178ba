"""The policy in training as an OpenAI-compatible endpoint on loopback: chat completions, and the list of its model.

Owns the form of requests and answers, the keys of episodes, and the thread of the server. `chat_turns` makes sequences
of what is asked. `wiring.trl_access` opens an episode and closes it.
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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from aiohttp import web

from salesrl_trl.agents.chat_turns import AgentCalls, Refused, Sequenced
from salesrl_trl.generation.sampler import is_deep
from salesrl_trl.generation.tasks import GivenUp
from salesrl_trl.ground.texts import encodable
from salesrl_trl.service.event_loop import THREADS

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MODEL = "policy"
MOST_CHOICES = 64
MAX_BODY_BYTES = 64 * 1024 * 1024
HEAD_S = 30.0  # for the head of a connection's next request. Clients keep an idle connection for 5 to 15 s.
BODY_S = 60.0
CLOSE_S = 0.5  # twice: for open requests to end, and to be cancelled
_READ = {
    "model", "messages", "tools", "stream", "stream_options", "n", "logprobs", "max_tokens", "max_completion_tokens",
    "user", "store", "metadata", "service_tier", "parallel_tool_calls", "prompt_cache_key",
}  # fmt: skip
"""Fields of a request that are followed, or that say nothing about how the policy answers."""
_USUAL = {"tool_choice": "auto", "response_format": {"type": "text"}}  # these ask for nothing
_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty")
_KINDS: dict[str, Any] = {
    "tools": list, "stream": bool, "stream_options": dict, "logprobs": bool, "response_format": dict,
    "tool_choice": str | dict, "stop": str | list, **dict.fromkeys(_NUMBERS, float | int),
}  # fmt: skip
_SETTLED_S = 0.02  # after which a new connection is among those of the server
_QUIET = logging.Logger("policy endpoint", logging.CRITICAL + 1)  # aiohttp quotes what is not HTTP


class PolicyEndpoint:
    """A server on a free port of loopback. Each episode has a key of its own, which holds while it is open."""

    def __init__(self) -> None:
        self._episodes: dict[str, AgentCalls] = {}
        self._tell = functools.cache(logger.warning)  # each line once
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guarded])
        app.add_routes([web.post("/v1/chat/completions", self._complete), web.get("/v1/models", _models)])
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
        """A new connection, which the server knows a moment later."""
        server = self._runner.server
        assert server is not None
        self._loop.call_later(_SETTLED_S, self._close_surplus, server)
        return server()

    def _close_surplus(self, server: web.Server) -> None:
        """Above half of the files that the process may open, the oldest connections are closed; of these first those
        without a request."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        transports = ((each, each.transport) for each in server.connections)
        is_open = [each for each, transport in transports if transport is not None and not transport.is_closing()]
        surplus = len(is_open) - most if most >= 0 else 0
        for oldest in sorted(is_open, key=lambda each: each._request_in_progress)[: max(surplus, 0)]:
            oldest.force_close()

    def close(self) -> None:
        """End within seconds, whatever agents have left open."""
        self._loop.call_soon_threadsafe(self._server.close)
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @contextlib.contextmanager
    def open(self, calls: AgentCalls) -> Iterator[str]:
        """While active, requests with the key that is yielded are those of this episode."""
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
        """Answers with the key of an open episode alone. What fails here or in the engine is kept for the trainer."""
        calls = self._calls(request)
        try:
            if calls is None:
                raise Refused("The key is of no episode that is under way.", code="invalid_api_key", status=401)
            return await handler(request)
        except Refused as refused:
            words, code, status = str(refused), refused.code, refused.status
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as nowhere:
            words = f"{request.method} {request.path} is not here. Expected POST /v1/chat/completions, GET /v1/models."
            code, status = "not_found", nowhere.status
        except (web.HTTPException, ConnectionError):
            raise
        except (Exception, GivenUp) as failure:
            words, code, status = "The policy answers this episode no more.", "given_up", 410
            if calls is None or calls.error is None:  # it is the request's fault, and this episode's alone
                words, code, status = f"The request can't be read: {type(failure).__name__}.", "invalid_request", 400
        if status == 400:
            self._tell(f"a request of an episode is refused: {words}")
        error = {"message": words, "type": "invalid_request_error", "param": None, "code": code}
        return web.json_response({"error": error}, status=status)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        calls, asked = self._calls(request), await _body(request)
        assert calls is not None
        for name in sorted(asked.keys() - _READ):
            if asked[name] is not None and asked[name] != _USUAL.get(name):
                what = f"`{name}`" if name in _KINDS else "a field of another name"  # there may be any number
                self._tell(f"off: {what} in requests of episodes. The policy samples with the run's own settings")
        started = await _in_thread(calls.start, asked["messages"], asked.get("tools") or None)
        ask = functools.partial(_in_thread, calls.turn, started, asked["max_tokens"])
        turns = await asyncio.gather(*(ask() for _ in range(asked["n"])))
        answer = _answer(calls, turns, has_logprobs=bool(asked.get("logprobs")))
        chunks = [*_chunks(answer, has_usage=bool((asked.get("stream_options") or {}).get("include_usage")))]
        calls.answered += turns  # not those of a request that was left
        if not asked.get("stream"):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def _is_tool(tool: object) -> bool:
    match tool:
        case {"function": {"name": str(), **others}}:
            return isinstance(others.get("parameters") or {}, dict)
    return False


async def _models(request: web.Request) -> web.Response:
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "salesrl_trl"}
    return web.json_response({"object": "list", "data": [model]})


async def _in_thread(function: Callable[..., object], *arguments: object) -> Any:
    return await asyncio.wrap_future(THREADS.submit(function, *arguments))


async def _body(request: web.Request) -> dict[str, Any]:
    """The fields of a request for a chat completion. Raises `Refused` for those that can't be answered."""
    try:
        async with asyncio.timeout(BODY_S):
            asked: Any = await request.json()
    except (ValueError, LookupError, RecursionError, TimeoutError):  # LookupError: of an unknown charset
        asked = None
    if not isinstance(asked, dict) or is_deep(asked):
        raise Refused(f"The body is not a JSON object, is nested too deeply, or took longer than {BODY_S:g} s.")
    asked = encodable(asked, "a request of an agent")
    given = {name: value for name, value in asked.items() if value is not None}
    messages, count = given.get("messages"), given.get("n", 1)
    most = given.get("max_completion_tokens", given.get("max_tokens"))
    refusals = {
        "`messages`: expected a list of messages.":
            not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages),
        **{f"`{name}` has the type {type(given[name]).__name__}.": not isinstance(given[name], kind)
            for name, kind in _KINDS.items() if name in given},
        "`tools`: expected functions, each with a `name`.": not all(map(_is_tool, given.get("tools") or ())),
        f"`n`: expected a number from 1 to {MOST_CHOICES}.": not (type(count) is int and 1 <= count <= MOST_CHOICES),
        "`max_tokens`: expected a number above 0.": most is not None and not (type(most) is int and most > 0),
        "`stop`: a turn of the policy ends with its own token.": bool(asked.get("stop")),
        "`top_logprobs`: the log-probs of sampled tokens alone are there.": bool(asked.get("top_logprobs")),
    }  # fmt: skip
    for words, holds in refusals.items():
        if holds:
            raise Refused(words)
    return {**asked, "n": count, "max_tokens": most}


def _answer(calls: AgentCalls, turns: Sequence[Sequenced], *, has_logprobs: bool) -> dict[str, Any]:
    prompt, written = len(turns[0].prompt_ids) + len(turns[0].ids) - turns[0].own, sum(turn.own for turn in turns)
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": place, **_choice(calls, turn, has_logprobs)} for place, turn in enumerate(turns)],
        "usage": {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written},
    }


def _choice(calls: AgentCalls, turn: Sequenced, has_logprobs: bool) -> dict[str, Any]:
    read, own = turn.messages[-1], turn.ids[-turn.own :]
    functions = [call.get("function", call) for call in read.get("tool_calls") or ()]
    message: dict[str, Any] = {"role": "assistant", "content": read["content"] or (None if functions else "")}
    if thought := read.get("reasoning_content"):
        message["reasoning_content"] = thought
    if functions:
        message["tool_calls"] = [
            {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {
                "name": function["name"], "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
            for function in functions
        ]  # fmt: skip
    logprobs = None
    if has_logprobs:
        if turn.logprobs is None:
            raise Refused("`logprobs`: the engine gives none.")
        texts = [calls.form.tokenizer.decode([token]) for token in own]
        logprobs = {"refusal": None, "content": [
            {"token": text, "logprob": logprob, "bytes": [*text.encode()], "top_logprobs": []}
            for text, logprob in zip(texts, turn.logprobs[-turn.own :], strict=True)
        ]}  # fmt: skip
    end = "length" if own[-1] not in calls.form.ends else "tool_calls" if functions else "stop"
    return {"message": message, "finish_reason": end, "logprobs": logprobs}


def _chunks(answer: Mapping[str, Any], *, has_usage: bool) -> Iterator[dict[str, Any]]:
    """An answer as a stream sends it: of each choice its message in one piece, then its end."""
    common = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in answer["choices"]:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
        piece = {"index": choice["index"], "logprobs": choice["logprobs"], "delta": delta, "finish_reason": None}
        yield {**common, "choices": [piece]}
        end = {"index": choice["index"], "logprobs": None, "delta": {}, "finish_reason": choice["finish_reason"]}
        yield {**common, "choices": [end]}
    if has_usage:
        yield {**common, "choices": [], "usage": answer["usage"]}
