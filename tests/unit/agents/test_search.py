"""The packaged tool: what it asks, what the policy is told, and what is the policy's own error."""

import asyncio
from types import SimpleNamespace

import pytest
from transformers.utils import get_json_schema

from salesrl_trl.agents.tools import ConversationNotes, Search, ToolCalls
from salesrl_trl.errors import ServiceUnavailable
from salesrl_trl.judged.cache import AnswerStore
from salesrl_trl.judged.rag_client import RagAnswers, RagBackend
from salesrl_trl.telemetry.completion_record import CompletionRecord
from salesrl_trl.types import DEFAULT_FORMAT, Answer, Passage


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
def search():
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
def test_what_the_policy_is_told_of_a_search_and_whose_error_it_was(search, arguments, told, counted, reason):
    calls, notes = ToolCalls(["search"]), ConversationNotes()
    result = asyncio.run(asyncio.wait_for(_caught(calls.call(search.function, notes, arguments)), 5))
    assert result == told
    counts = calls.counts["search"]
    assert {name: counts[name] for name in ("errors", "failures") if counts[name]} == counted
    assert notes.failed == reason
    action = {"user_profile": "", "rewritten_query": arguments.get("query"), "history_summary": ""}
    assert search._rag.backend.asked == ([] if told in (ValueError, TypeError) else [(action, 0.1, 2)])


async def _caught(call):
    try:
        return await call
    except Exception as error:
        return type(error)


def test_connections_are_closed_on_the_loop_that_opened_them(search):
    async def closed():
        await search.function("yoga")
        await asyncio.to_thread(search.close)
        return asyncio.get_running_loop()

    rag = search._rag.backend
    assert asyncio.run(closed()) is rag.closed_on
    search.close()  # a second time there is nothing to close


def test_equal_searches_are_one_request_and_every_conversation_has_its_call_in_the_record(search):
    """Searches that found nothing are asked again."""
    notes = [ConversationNotes(record=CompletionRecord()) for number in range(3)]

    async def searched(*queries):
        calls = ToolCalls(["search"])
        for query in queries:
            await asyncio.gather(*(calls.call(search.function, each, {"query": query}) for each in notes))

    asyncio.run(searched("yoga", "yoga", "nothing"))
    asked = [action["rewritten_query"] for action, *_ in search._rag.backend.asked]
    assert asked == ["yoga", "nothing"]  # of "nothing" one that all three share
    assert [len(each.record.calls) for each in notes] == [3] * 3


def test_trl_reads_the_tool_s_name_and_argument(search):
    function = SimpleNamespace(**get_json_schema(search.function)["function"])
    assert (function.name, function.parameters["required"]) == ("search", ["query"])
