"""Text of other programs is read in a time that grows with its length, not with its square.

It is read between the calls of all completions: while one text is read, all of them stand still, deadlines included.
"""

import contextlib
import json
import time
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.seconds import check_seconds

from salesrl_trl.demo.services.rubric import content_words, words
from salesrl_trl.errors import BadServiceResponse, JudgeInvalid
from salesrl_trl.ground.fencing import neutralise
from salesrl_trl.judged.parsing import MAX_COMPLETION_CHARS, is_empty_text, parse_action
from salesrl_trl.judged.provider import JudgeProvider, ProviderClient, _text_of
from salesrl_trl.judged.rag_client import MAX_ANSWER_CHARS, _read_answer
from salesrl_trl.judged.verdict import MAX_VERDICT_CHARS, read_verdict
from salesrl_trl.service.breaker import Bill
from salesrl_trl.service.http import HttpClient
from salesrl_trl.service.statuses import retry_after_s
from salesrl_trl.types import InvalidAction

NONCE = "0123456789abcdef"
CHARS = 128 * 1024
"""Twice what an answer or a verdict may hold. The square of it, at a nanosecond each, is 17 s."""
MOST_S = 1.0
"""Seconds of the thread's own time, so that other processes do not count. The slowest reader takes 0.1 s."""

PROVIDER = ProviderClient(
    JudgeProvider(name="judge", base_url="http://127.0.0.1:9", model="m", transport=SimpleNamespace(service="judge"))
)
READERS = {
    "completion": parse_action,
    "hollow": is_empty_text,
    "verdict": lambda text: read_verdict(text, nonce=NONCE, expect_reference=True)[0],
    "rag answer": lambda text: _read_answer(HttpClient("rag_8b", "http://127.0.0.1"), "salesrl-1", text.encode()),
    "chat completion": lambda text: _text_of(PROVIDER._completion(text.encode())),
    "retry after": lambda text: retry_after_s({"retry-after": text[:8190]}),  # all of a header that aiohttp takes
    "fence": lambda text: neutralise(text, NONCE),
    "search": lambda text: words(text[: CHARS // 8]),  # the embedded services: in a process of their own
    "embedded judge": lambda text: content_words(text[: CHARS // 8]),
}
UNITS = (
    " ", "\n", "\n ", "a", "0", "f", ".", "A. ", "{", "[", '{"a":', "[0,", "0,", "{},", '"",', '"', '{"', "\\", "\\u",
    "`", "```", "\n```", "<", "<|", ">", "<s", "\u200b", "\u0301\u0316", "\ufdfa", "千", "千a", "，",
)  # fmt: skip
BEGINNINGS = (
    *("", "{", '{"', '{"candidate": 0.5, "reference": 0.5, "reason": "', '{"answer": "', "```json", "```json\n"),
    *('{"answer": "x", "took_ms": 1, "passages": [', '{"choices": [', '{"data": [{"index": 0, "embedding": ['),
    *("<", "Solution", "customer: "),
)
ENDS = ("", "x", '"', "}", '"}', "]}", "```", "\n```", "元")


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=30)
@given(
    unit=st.sampled_from(UNITS) | st.text(alphabet=sorted(set("".join(UNITS))), min_size=1, max_size=4),
    beginning=st.sampled_from(BEGINNINGS),
    end=st.sampled_from(ENDS),
)
@example(unit=" ", beginning="", end="x")
@example(unit="\n", beginning="```json", end="x")
@example(unit="\u0301\u0316", beginning="a", end="")
@example(unit="千", beginning="", end="")
def test_no_text_takes_the_square_of_its_length(reader, unit, beginning, end):
    text = beginning + unit * (CHARS // len(unit)) + end
    started = time.thread_time()
    with contextlib.suppress(BadServiceResponse):  # it is no answer, which is soon said
        READERS[reader](text)
    check_seconds(time.thread_time() - started, most=MOST_S, what=f"{beginning!r} + {unit!r} x n + {end!r}")


ANSWER = '{"answer": "%s", "passages": [], "took_ms": 1}'
LONG = " " * (4 * 1024 * 1024)


def test_what_is_too_long_is_not_parsed():
    assert parse_action("{" + LONG[:MAX_COMPLETION_CHARS] + "}") == InvalidAction(reason="too_long")
    for reader, text, code in (
        ("verdict", "{" + LONG[:MAX_VERDICT_CHARS] + "}", "judge_not_json"),
        ("rag answer", ANSWER % LONG[: MAX_ANSWER_CHARS + 1], "rag_8b_bad_response"),
    ):
        with pytest.raises(BadServiceResponse) as caught:
            READERS[reader](text)
        assert caught.value.code == code


def test_a_verdict_behind_long_thoughts_is_read():
    verdict = f'{{"nonce": "{NONCE}", "candidate": 0.25, "reference": 0.5, "reason": ""}}'
    assert READERS["verdict"](f"{LONG}{{{LONG}{verdict}\n```\n").candidate == 0.25
    with pytest.raises(JudgeInvalid):
        READERS["verdict"](f"{verdict}{LONG}.")


def test_gaps_of_any_length_hide_no_opener():
    for gap in ("." * 300_000, " " * 300_000, ":\n" * 150_000, "\u200b" * 300_000):
        assert is_empty_text(gap)
        assert is_empty_text(f"{gap}Thought process:{gap}")
        assert not is_empty_text(f"{gap}answer{gap}5980{gap}")
    assert is_empty_text(f"Thought{' ' * 300_000}process")


def test_half_a_surrogate_pair_in_a_reply_is_replaced():
    """What a judge writes is JSON inside of JSON: each may hold one."""
    half = "half \ud83d pair"
    verdict = json.dumps({"nonce": NONCE, "candidate": 0.25, "reference": 0.5, "reason": half})
    assert READERS["verdict"](verdict).reason == "half \ufffd pair"
    completion = json.dumps({"choices": [{"message": {"content": half}, "finish_reason": "stop"}]})
    assert READERS["chat completion"](completion) == "half \ufffd pair"
    passage = {"id": half, "text": half, "score": 0.9}
    answer = READERS["rag answer"](json.dumps({"answer": half, "passages": [passage], "took_ms": 1}))
    assert (answer.text, answer.passages[0].text) == ("half \ufffd pair",) * 2


@pytest.mark.parametrize("count", [10**400, -1], ids=["10**400", "-1"])
def test_a_usage_that_can_not_be_loses_no_verdict(count):
    usage = f'{{"prompt_tokens": {count}, "completion_tokens": 7}}'
    content = f'{{"choices": [{{"message": {{"content": "hi"}}, "finish_reason": "stop"}}], "usage": {usage}}}'
    completion = PROVIDER._completion(content.encode())
    PROVIDER._count_tokens(completion["usage"], Bill(None))
    assert _text_of(completion) == "hi"
    assert PROVIDER.drain_usage().completion_tokens == 0


def test_a_thought_among_the_parts_is_no_text():
    thought = [{"type": "reasoning_text", "text": "perhaps 1"}]
    with pytest.raises(JudgeInvalid, match="answered without any text"):
        _text_of({"choices": [{"message": {"role": "assistant", "content": thought}, "finish_reason": "stop"}]})
