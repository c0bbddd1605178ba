"""Conversations under ten kinds of faults, over a customer's model on loopback and a MCP server, against a ledger.

Every text carries its conversation's number and turn. `CONVERSATIONS=10000` runs so many.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from aiohttp import web
from support.agents import chat_tokenizer
from support.providers import completion
from support.talking import Talks

from salesrl_trl.agents.customer import Customer
from salesrl_trl.agents.mcp_tools import close, mcp_tools
from salesrl_trl.agents.tools import tool
from salesrl_trl.judged.budget import Budget, Limit
from salesrl_trl.judged.provider import JudgeProvider, ProviderClient
from salesrl_trl.service.transport import Transport

pytest.importorskip("mcp", reason="the extra `agents` is not installed")

MANY, AT_ONCE, TURNS = int(os.environ.get("CONVERSATIONS", "100")), 64, 4
FAULTY = Path(__file__).parents[1] / "support/mcp_faulty.py"
CUSTOMERS = {
    "429": "customer_http_429", "500": "customer_http_500", "hang": "customer_timeout",
    "half a reply": "customer_unavailable", "wrong JSON": "customer_no_reply", "empty": "customer_empty",
}  # fmt: skip
TOOLS = {
    "tool raises": ("raises", "tool_raises_unavailable"), "MCP dies": ("dies", "tool_dies_unavailable"),
    "deadline": ("slow", "tool_slow_timeout"), "budget": ("paid", "budget_spent"),
}  # fmt: skip
"""The ten kinds of faults, and the reason that each gives its conversation."""
OTHERS = {"told": "tells", "MCP": "read_dies", "nothing": None}
"""Conversations that call a tool without a failure, or none."""
SHARES = dict.fromkeys(CUSTOMERS, 3.0) | dict.fromkeys(TOOLS, 3.0) | {"hang": 1, "deadline": 1, "MCP dies": 0.3}
SHARES |= {"told": 5, "MCP": 10, "nothing": 60}
PAID = MANY // 100  # calls within the budget


def planned(number):
    """How conversation `number` fails, and after how many turns of the policy."""
    chance = random.Random(number)
    return chance.choices([*SHARES], [*SHARES.values()])[0], chance.randint(1, TURNS - 1)


async def raises(word: str) -> str:
    """Raises."""
    raise ConnectionError("key=secret")


async def slow(word: str) -> str:
    """Hangs."""
    await asyncio.sleep(60)


async def tells(word: str) -> str:
    """Fails by the policy's fault."""
    raise KeyError(f"no {word}")


def paid_tool(folder):
    budget = Budget(folder / "spent.json", [Limit(name="max_calls", kind="calls", most=PAID)])
    transport = Transport("paid", max_concurrency=8, attempt_timeout_s=30, max_attempts=1, quota=budget.quota("paid"))

    async def paid(word: str) -> str:
        """Costs a call."""
        return word

    return tool(transport=transport)(paid)


async def answer(request):
    """The customer's model: it answers turn by turn, or with its conversation's fault."""
    body = await request.json()
    number = int(re.search(r"item (\d+)", body["messages"][0]["content"])[1])
    turn = sum(message["role"] == "user" for message in body["messages"])
    way, at = planned(number)
    if way not in CUSTOMERS or turn != at:
        said = {"reply": f"{number}, {turn}", "decision": "refuse" if turn == TURNS else "continue", "price": None}
        return web.json_response(completion(json.dumps(said)))
    if way in ("429", "500"):
        return web.json_response({}, status=int(way), headers={"Retry-After": "600"} if way == "429" else {})
    if way == "hang":
        await asyncio.sleep(20)
    if way == "half a reply":
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(json.dumps(completion(f"{number}, {turn}")).encode()[:60])
        request.transport.abort()
        return response
    return web.json_response(completion(json.dumps({"said": f"{number}"}) if way == "wrong JSON" else ""))


@contextlib.contextmanager
def on_loopback(handler):
    """The address of a server on a loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, site._server.sockets[0].getsockname()[1]

    runner, port = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def turns_of(number, name):
    """The policy's texts: a call of the tool in place of the turn that fails, and one turn more."""
    texts = [f"{number}: {turn}" for turn in range(1, TURNS + 1)]
    if name is not None:
        call = json.dumps({"name": name, "arguments": {"word": f"w{number}"}})
        texts.insert(planned(number)[1] - 1, f"<tool_call>\n{call}\n</tool_call>")
    return texts


def checked(number, talked, sampled):
    """Check one conversation against its plan. Returns the fault or share it belongs to, and its reason."""
    way, at = planned(number)
    name = TOOLS[way][0] if way in TOOLS else OTHERS.get(way)
    expected = CUSTOMERS.get(way) or (TOOLS[way][1] if way in TOOLS else None)
    allowed = {expected}
    if way == "MCP":  # its server may die by another's call, each time that it asks again
        allowed |= {"tool_read_dies_unavailable", "tool_read_dies_breaker_open"}
    if way == "MCP dies":  # after several deaths in a row
        allowed.add("tool_dies_breaker_open")
    if way == "budget":
        allowed.add(None)
    reason, messages = talked.notes.failed, talked.sequence.messages
    assert reason in allowed, (number, way, reason)
    # 1. what it was told is its own, turn by turn, and ends where it failed
    heard = [message["content"] for message in messages if message["role"] == "user"]
    assert heard == [f"{number}, {turn}" for turn in range(1, at if reason else TURNS + 1)], (number, way, heard)
    results = [message["content"] for message in messages if message["role"] == "tool"]
    told = {"tells": f"no w{number}", "read_dies": f"w{number}", "paid": f"w{number}"}.get(name)
    assert len(results) == (name is not None)
    assert all(told in each if reason is None else each == "" for each in results), (number, results)
    # 2. the policy's turns are those that it sampled
    own = [token for token, is_own in zip(talked.sequence.ids, talked.sequence.mask, strict=True) if is_own]
    assert own == [token for ids in sampled for token in ids]
    assert len(sampled) == (at if reason else TURNS + (name is not None))
    assert "secret" not in json.dumps(messages)
    return way, reason


@pytest.mark.timeout(1800)
def test_under_ten_kinds_of_faults_no_conversation_has_anothers_turn_or_is_lost_without_a_reason(tmp_path, caplog):
    mark = tmp_path / "mark"
    mark.touch()
    served = mcp_tools(f"{sys.executable} {FAULTY}", env={"MARK": str(mark)})
    tools = [raises, tool(deadline_s=1)(slow), tells, paid_tool(tmp_path)]
    tools += [each for each in served if each.__name__ in ("dies", "read_dies")]
    schemas = [
        {"type": "function", "function": {"name": each.__name__, "description": "Looks.", "parameters": {
            "type": "object", "properties": {"word": {"type": "string"}}}}} for each in tools
    ]  # fmt: skip
    with on_loopback(answer) as url:
        transport = Transport("customer", max_concurrency=AT_ONCE, initial_concurrency=AT_ONCE, max_attempts=1,
                              attempt_timeout_s=10, hedge_fraction=0.0)  # fmt: skip
        customer = Customer(max_turns=TURNS, deadline_s=60)
        customer.connect(ProviderClient(JudgeProvider(name="customer", base_url=url, model="m", transport=transport)))
        talks = Talks(chat_tokenizer(tmp_path / "policy"), customer, tools=tools, schemas=schemas)

        def talk(number):
            way, _ = planned(number)
            texts = turns_of(number, TOOLS[way][0] if way in TOOLS else OTHERS.get(way))
            persona = {"needs": f"item {number}.", "reservation": 1.0, "list_price": 2.0}
            row = {"prompt": [{"role": "user", "content": f"Conversation {number}."}], "persona": persona}
            return checked(number, *talks.talk(texts, row, number))

        with ThreadPoolExecutor(AT_ONCE) as pool:
            ledger = Counter(pool.map(talk, range(MANY)))
        customer.close()
        close(served)
        talks.close()
    assert ledger.total() == MANY
    ways = Counter(planned(number)[0] for number in range(MANY))
    assert ledger["budget", None] == min(PAID, ways["budget"])
    for way in ways:
        assert sum(count for (each, _), count in ledger.items() if each == way) == ways[way]
    assert "secret" not in caplog.text
    print(f"\n{MANY} conversations")
    for (way, reason), count in sorted(ledger.items(), key=str):
        print(f"{way:14} {reason or 'finished':28} {count:6}")
