"""Calls of tools: whose error it was, and what becomes of it."""

import asyncio
import time

import pytest
from support.recordings import batch, entry, write
from support.seconds import check_seconds

from salesrl_trl.agents.tools import ConversationNotes, Search, ToolCalls, tool
from salesrl_trl.errors import ConfigError, ServiceUnavailable
from salesrl_trl.judged.cache import AnswerStore
from salesrl_trl.judged.rag_client import RagAnswers, RagBackend
from salesrl_trl.record.replay import ReplayReward
from salesrl_trl.reward.functions import reward_of
from salesrl_trl.service.transport import Transport
from salesrl_trl.telemetry.completion_record import CompletionRecord
from salesrl_trl.types import DEFAULT_FORMAT, Answer, Passage


class HTTPError(Exception):
    """As those of requests and httpx have it."""

    def __init__(self, status):
        super().__init__("key=secret")
        self.response = type("Response", (), {"status_code": status, "headers": {}})()


def call(function, failed, **arguments):
    """The result of a call, and its counts."""
    calls, notes = ToolCalls([function.__name__]), ConversationNotes()
    try:
        result = asyncio.run(calls.call(function, notes, arguments))
    except Exception as error:
        result = error
    failed += [notes.failed] if notes.failed else []
    counts = dict(calls.counts[function.__name__])
    assert counts.pop("seconds") > 0
    return result, counts


def search(query: str) -> str:
    if query == "down":
        raise HTTPError(503)
    if query == "slow":
        time.sleep(1)
    return {"a": "found"}[query]


async def asearch(query: str) -> str:
    if query == "slow":
        await asyncio.sleep(1)
    return search(query)


@pytest.mark.parametrize("function", [search, asearch], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("query", "counted", "reason"),
    [
        ("a", {}, None),
        ("b", {"errors": 1}, None),  # the policy's own
        ("down", {"failures": 1}, "http_503"),
        ("slow", {"failures": 1}, "timeout"),
    ],
)
def test_a_failed_service_leaves_the_conversation_out_and_an_error_of_the_policy_is_told(
    function, query, counted, reason
):
    failed = []
    result, counts = call(tool(deadline_s=0.1 if query == "slow" else 30)(function), failed, query=query)
    assert counts == {"calls": 1, "failures": 0, "errors": 0} | counted
    assert failed == ([] if reason is None else [f"tool_{function.__name__}_{reason}"])
    assert isinstance(result, KeyError) if counted.get("errors") else result == ("found" if query == "a" else "")


def test_a_failure_is_told_by_its_code_alone_where_the_user_wants_it():
    failed = []
    result, counts = call(tool(on_failure="tell")(search), failed, query="down")
    assert (str(result), failed, counts["failures"]) == ("tool_search_http_503", [], 1)


def test_a_transport_tries_a_failed_service_again_and_never_an_error_of_the_policy():
    tried = []

    async def look(query):
        tried.append(query)
        if query == "wrong":
            raise ValueError(query)
        if len(tried) < 3:
            raise ServiceUnavailable("down", "down")
        return "found"

    transport = Transport("search", max_concurrency=4, attempt_timeout_s=5, max_attempts=3)
    failed = []
    look = tool(transport=transport)(look)
    assert call(look, failed, query="right") == ("found", {"calls": 1, "failures": 0, "errors": 0})
    assert len(tried) == 3
    result, counts = call(look, failed, query="wrong")
    assert (str(result), counts["errors"], tried[3:], failed) == ("wrong", 1, ["wrong"], [])


def test_calls_of_one_turn_run_at_once_and_results_keep_their_order():
    def wait(number):
        time.sleep(0.2)
        return number

    notes = ConversationNotes()
    calls = ToolCalls(["wait"])

    async def turn():
        return await asyncio.gather(*(calls.call(wait, notes, {"number": number}) for number in (1, 2)))

    began = time.perf_counter()
    assert asyncio.run(turn()) == [1, 2]
    check_seconds(time.perf_counter() - began, most=0.39)


@pytest.mark.parametrize("given", [{"on_failure": "ignore"}, {"deadline_s": 0}])
def test_a_setting_that_says_nothing_is_refused(given):
    with pytest.raises(ConfigError):
        tool(**given)


def ends_of(function, queries, replay=None):
    """How calls end, each in its result or error, and the reason by which its conversation is left out; the record."""
    calls, ends, kept = ToolCalls(["search"], replay), [], CompletionRecord()

    async def all_of_them():
        for query in queries:
            notes = ConversationNotes(record=kept, turns=1)
            try:
                result = await calls.call(function, notes, {"query": query})
            except Exception as error:
                result = f"error: {error}"
            ends.append((result, notes.failed))

    asyncio.run(all_of_them())
    return ends, kept, calls.counts["search"]


def test_a_replayed_call_ends_as_the_recorded_one_did_and_calls_nobody(tmp_path):
    seen = []

    @tool
    def search(query: str) -> str:
        seen.append(query)
        if query == "down":
            raise HTTPError(503)
        return {"again": f"found {len(seen)}", "empty": ""}[query]

    queries = ["again", "empty", "down", "again", "wrong"]
    ends, kept, _ = ends_of(search, queries)
    assert [failed for _, failed in ends] == [None, None, "tool_search_http_503", None, None]
    write(tmp_path, [batch(entries=[entry(record=kept)])])

    def again(queries, on_miss):
        reward = ReplayReward(reward_of(lambda completions, **_: [0.0]), tmp_path, on_miss)
        return ends_of(search, queries, reward)

    seen.clear()
    replayed, of_replay, counts_again = again(queries, "fail")
    assert replayed == ends
    assert [(call.request, call.answer, call.failure) for call in of_replay.calls if not call.failure] == [
        (call.request, call.answer, call.failure) for call in kept.calls if not call.failure
    ]
    assert [counts_again[name] for name in ("calls", "failures", "errors")] == [5, 1, 1]
    assert again(["other"], "fail")[0] == [("", "tool_search_not_recorded")]
    assert again(["agains"], "nearest")[0] == [("found 1", None)]
    assert seen == []
    assert again(["again", "other"], "live")[0] == [("found 1", None), ("error: 'other'", None)]
    assert seen == ["other"]


class Rag(RagBackend):
    def __init__(self):
        self.transports, self.identity = {"rag_8b": None}, "rag"
        self.asked, self.closed_on = [], None

    async def chat_8b(self, context, action, score_threshold, top_k, *, ids):
        self.asked.append((action.as_dict(), score_threshold, top_k))
        if action.query == "down":
            raise ServiceUnavailable("it is down", code="rag_8b_unavailable")
        texts = [] if action.query == "nothing" else ["one", "two"]
        return Answer(text="none", passages=tuple(Passage(id=t, text=t, score=0.5) for t in texts), took_ms=0.0)

    async def chat(self, *_, **__):
        raise AssertionError("the tool asks the 8B endpoint")

    async def aclose(self):
        self.closed_on = asyncio.get_running_loop()


@pytest.fixture
def packaged():
    made = Search(deadline_s=5.0)
    made.connect(RagAnswers(Rag(), 0.1, 2, DEFAULT_FORMAT, AnswerStore(), AnswerStore()))
    return made


@pytest.mark.parametrize(
    ("arguments", "told", "counted", "reason"),
    [
        ({"query": "yoga price"}, "one\n\ntwo", {}, None),
        ({"query": "nothing"}, "none", {}, None),
        ({"query": "down"}, "", {"failures": 1}, "rag_8b_unavailable"),
        ({"query": " "}, ValueError, {"errors": 1}, None),
        ({"query": 7}, ValueError, {"errors": 1}, None),
        ({"words": "yoga"}, TypeError, {"errors": 1}, None),
    ],
    ids=["found", "nothing found", "down", "empty", "a number", "another argument"],
)
def test_what_the_policy_is_told_of_a_search_and_whose_error_it_was(packaged, arguments, told, counted, reason):
    calls, notes = ToolCalls(["search"]), ConversationNotes()
    result = asyncio.run(asyncio.wait_for(_caught(calls.call(packaged.function, notes, arguments)), 5))
    assert result == told
    counts = calls.counts["search"]
    assert {name: counts[name] for name in ("errors", "failures") if counts[name]} == counted
    assert notes.failed == reason
    action = {"user_profile": "", "rewritten_query": arguments.get("query"), "history_summary": ""}
    assert packaged._rag.backend.asked == ([] if told in (ValueError, TypeError) else [(action, 0.1, 2)])


async def _caught(call):
    try:
        return await call
    except Exception as error:
        return type(error)


def test_connections_are_closed_on_the_loop_that_opened_them(packaged):
    async def closed():
        await packaged.function("yoga")
        await asyncio.to_thread(packaged.close)
        return asyncio.get_running_loop()

    rag = packaged._rag.backend
    assert asyncio.run(closed()) is rag.closed_on
    packaged.close()  # a second time there is nothing to close


def test_equal_searches_are_one_request_and_every_conversation_has_its_call_in_the_record(packaged):
    """Searches that found nothing are asked again."""
    notes = [ConversationNotes(record=CompletionRecord()) for number in range(3)]

    async def searched(*queries):
        calls = ToolCalls(["search"])
        for query in queries:
            await asyncio.gather(*(calls.call(packaged.function, each, {"query": query}) for each in notes))

    asyncio.run(searched("yoga", "yoga", "nothing"))
    asked = [action["rewritten_query"] for action, *_ in packaged._rag.backend.asked]
    assert asked == ["yoga", "nothing"]  # of "nothing" one that all three share
    assert [len(each.record.calls) for each in notes] == [3] * 3
