"""The policy in training as an OpenAI-compatible endpoint on loopback: chat completions, and the list of its model.

Owns the form of requests and answers, the keys of episodes, and the thread of the server. `chat_turns` makes sequences
of what is asked. `wiring.trl_access` opens an episode and closes it.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from aiohttp import web

from salesrl_trl.generation.conversations import GivenUp
from salesrl_trl.reward.watched_loop import THREADS
from salesrl_trl.rollout.chat_turns import AgentCalls, Refused, Sequenced

logger = logging.getLogger(__name__)

MODEL = "policy"
MOST_CHOICES = 64
MAX_BODY_BYTES = 64 * 1024 * 1024
_READ = {
    "model", "messages", "tools", "stream", "stream_options", "n", "logprobs", "max_tokens", "max_completion_tokens",
    "user", "store", "metadata", "service_tier", "parallel_tool_calls", "prompt_cache_key",
}  # fmt: skip
"""Fields of a request that are followed, or that say nothing about how the policy answers."""


class PolicyEndpoint:
    """A server on a free port of loopback. Each episode has a key of its own, which holds while it is open."""

    def __init__(self) -> None:
        self._episodes: dict[str, AgentCalls] = {}
        self._told: set[str] = set()
        self._loop, started = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), name="policy endpoint", daemon=True)
        self._thread.start()
        started.wait()

    def _serve(self, started: threading.Event) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes([web.post("/v1/chat/completions", self._complete), web.get("/v1/models", self._models)])
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)

        async def start() -> None:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.address = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            started.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @contextlib.contextmanager
    def open(self, calls: AgentCalls) -> Iterator[str]:
        """While active, requests with the key that is yielded are those of this episode."""
        key = f"episode-{secrets.token_urlsafe(32)}"
        self._episodes[key] = calls
        try:
            yield key
        finally:
            del self._episodes[key]

    def _calls_of(self, request: web.Request) -> AgentCalls:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        calls = self._episodes.get(key) if scheme.lower() == "bearer" else None
        if calls is None:
            raise Refused("The key is of no episode that is under way.", code="invalid_api_key", status=401)
        return calls

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._calls_of(request)
        except Refused as refused:
            return self._refusal(refused)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "salesrl_trl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        calls = None
        try:
            calls = self._calls_of(request)
            asked = await _body(request)
            self._tell_ignored(asked)
            most, count = asked.get("max_completion_tokens") or asked.get("max_tokens"), asked.get("n") or 1
            started = await _in_thread(calls.start, asked["messages"], asked.get("tools") or None)
            turns = await asyncio.gather(*(_in_thread(calls.turn, started, most) for _ in range(count)))
            if asked.get("logprobs") and turns[0].logprobs is None:
                raise Refused("`logprobs`: the engine gives none.")
        except Refused as refused:
            return self._refusal(refused)
        except (Exception, GivenUp) as error:
            if calls is not None:
                calls.error = error
            return self._refusal(Refused("The policy answers this episode no more.", code="given_up", status=410))
        calls.answered += turns  # not those of a request that was left
        answer = _answer(calls, turns, has_logprobs=bool(asked.get("logprobs")))
        if not asked.get("stream"):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for chunk in _chunks(answer, has_usage=bool((asked.get("stream_options") or {}).get("include_usage"))):
            await response.write(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def _tell_ignored(self, asked: Mapping[str, Any]) -> None:
        usual = {"tool_choice": "auto", "response_format": {"type": "text"}}
        for name in asked.keys() - _READ:
            if asked[name] is not None and asked[name] != usual.get(name):
                self._tell(f"off: `{name}` in requests of episodes. The policy samples with the run's own settings")

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            logger.warning(line)

    def _refusal(self, refused: Refused) -> web.Response:
        if refused.status == 400:
            self._tell(f"a request of an episode is refused: {refused}")
        error = {"message": str(refused), "type": "invalid_request_error", "param": None, "code": refused.code}
        return web.json_response({"error": error}, status=refused.status)


async def _in_thread(function: Callable[..., Any], *arguments: object) -> Any:
    return await asyncio.wrap_future(THREADS.submit(function, *arguments))


async def _body(request: web.Request) -> dict[str, Any]:
    """The fields of a request for a chat completion. Raises `Refused` for those that can't be answered."""
    try:
        asked: Any = await request.json()
    except ValueError:
        raise Refused("The body is no JSON.") from None
    messages = asked.get("messages") if isinstance(asked, dict) else None
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise Refused("`messages`: expected a list of messages.")
    count, most = asked.get("n") or 1, asked.get("max_completion_tokens") or asked.get("max_tokens")
    refusals = {
        f"`n`: expected a number from 1 to {MOST_CHOICES}.": not (type(count) is int and 1 <= count <= MOST_CHOICES),
        "`max_tokens`: expected a number above 0.": most is not None and not (type(most) is int and most > 0),
        "`stop`: a turn of the policy ends with its own token.": bool(asked.get("stop")),
        "`top_logprobs`: the log-probs of sampled tokens alone are there.": bool(asked.get("top_logprobs")),
        "`tools`: expected a list of functions.": not isinstance(asked.get("tools") or [], list),
    }
    for words, holds in refusals.items():
        if holds:
            raise Refused(words)
    return dict(asked)


def _answer(calls: AgentCalls, turns: Sequence[Sequenced], *, has_logprobs: bool) -> dict[str, Any]:
    prompt = len(turns[0].prompt_ids) + len(turns[0].ids) - turns[0].own
    written = sum(turn.own for turn in turns)
    usage = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
    choices = [
        {"index": place, **_choice(calls, turn), "logprobs": _logprobs(calls, turn) if has_logprobs else None}
        for place, turn in enumerate(turns)
    ]
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": "chat.completion", "created": int(time.time()),
            "model": MODEL, "choices": choices, "usage": usage}  # fmt: skip


def _choice(calls: AgentCalls, turn: Sequenced) -> dict[str, Any]:
    read = turn.messages[-1]
    message: dict[str, Any] = {"role": "assistant", "content": read["content"] or None}
    if thought := read.get("reasoning_content"):
        message["reasoning_content"] = thought
    functions = [call.get("function", call) for call in read.get("tool_calls") or ()]
    if functions:
        message["tool_calls"] = [
            {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {
                "name": function["name"], "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
            for function in functions
        ]  # fmt: skip
    elif message["content"] is None:
        message["content"] = ""
    is_cut = turn.ids[-1] not in calls.form.ends
    return {"message": message, "finish_reason": "length" if is_cut else "tool_calls" if functions else "stop"}


def _logprobs(calls: AgentCalls, turn: Sequenced) -> dict[str, Any]:
    texts = [calls.form.tokenizer.decode([token]) for token in turn.ids[-turn.own :]]
    logprobs = (turn.logprobs or [])[-turn.own :]
    pairs = zip(texts, logprobs, strict=True)
    content = [
        {"token": text, "logprob": logprob, "bytes": [*text.encode()], "top_logprobs": []} for text, logprob in pairs
    ]
    return {"content": content, "refusal": None}


def _chunks(answer: Mapping[str, Any], *, has_usage: bool) -> Iterator[dict[str, Any]]:
    """An answer as a stream sends it: of each choice its message in one piece, then its end."""
    common = {**answer, "object": "chat.completion.chunk"}
    common.pop("usage")
    for choice in answer["choices"]:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
        piece = {"index": choice["index"], "logprobs": choice["logprobs"]}
        yield {**common, "choices": [{**piece, "delta": delta, "finish_reason": None}]}
        end = {"index": choice["index"], "logprobs": None, "delta": {}, "finish_reason": choice["finish_reason"]}
        yield {**common, "choices": [end]}
    if has_usage:
        yield {**common, "choices": [], "usage": answer["usage"]}
