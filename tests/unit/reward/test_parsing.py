"""From a text to an action, or to the reason why it is none; and texts that say nothing."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from salesrl_trl.judged.parsing import _EMPTY, INVALID_REASONS, MAX_FIELD_CHARS, is_empty_text, parse_action
from salesrl_trl.types import Action, ActionFormat, InvalidAction

FIELDS = {"user_profile": "上班族", "rewritten_query": "Python price", "history_summary": ""}
TEXT = json.dumps(FIELDS, ensure_ascii=False)


@pytest.mark.parametrize("text", [TEXT, f"\n {TEXT} \n", f"```json\n{TEXT}\n```", f"```\n{TEXT}\n```"])
def test_an_action_is_read(text):
    assert parse_action(text) == Action(fields=FIELDS)


def test_an_action_has_the_fields_that_are_wanted_in_the_order_they_are_wanted():
    wanted = ActionFormat(fields=("query", "filters"), query="query")
    parsed = parse_action('{"filters": "", "query": "Python"}', wanted)
    assert list(parsed.as_dict().items()) == [("query", "Python"), ("filters", "")]
    assert (parsed.query, parsed.others) == ("Python", [""])
    assert parse_action('{"filters": "x", "query": " "}', wanted) == InvalidAction(reason="empty_query")
    assert parse_action(TEXT, wanted) == InvalidAction(reason="missing_field")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("  ", "empty"),
        (TEXT[:-1], "not_json"),
        (f"Sure! {TEXT}", "not_json"),
        ("[" * 100_000, "not_json"),
        ("[]", "not_an_object"),
        (json.dumps({**FIELDS, "rewritten_query": ["a"]}), "wrong_type"),
        (json.dumps({key: FIELDS[key] for key in ("user_profile", "rewritten_query")}), "missing_field"),
        (json.dumps({**FIELDS, "score": 1}), "extra_field"),
        (json.dumps({**FIELDS, "rewritten_query": " \n"}), "empty_query"),
        (json.dumps({**FIELDS, "user_profile": "x" * (MAX_FIELD_CHARS + 1)}), "too_long"),
    ],
)
def test_what_is_no_action_is_named_by_reason(text, reason):
    assert parse_action(text) == InvalidAction(reason=reason)
    assert reason in INVALID_REASONS


@given(st.text())
def test_no_completion_makes_it_raise(text):
    parsed = parse_action(text)
    assert isinstance(parsed, Action) or parsed.reason in INVALID_REASONS


# The master keys of arXiv:2507.08794, table 1, and their variants in width, case, markup and invisible characters.
MASTER_KEYS = (
    "", " ", "\n\t", ".", ",", ":", "。", "……", "—", "()", "{}", "Thought process:", "thought process",
    "**Thought process:**", "Ｔｈｏｕｇｈｔ　ｐｒｏｃｅｓｓ：", "Thought\u200b process:", "Solution", "## Solution:",
    "Let's solve this problem step by step.", "Let’s solve this problem step by step.", "解", "解：", "かいせつ",
    "Respuesta", "The answer is:", "OK!", "思考过程：", "\u200b\u200d\ufeff",
)  # fmt: skip


@pytest.mark.parametrize("text", MASTER_KEYS, ids=repr)
def test_a_master_key_is_hollow(text):
    assert is_empty_text(text)


@pytest.mark.parametrize("text", ["5980", "解：五千九百八十元", "Solution: call us on Monday", "好的，周六上课", "A"])
def test_an_answer_is_not(text):
    assert not is_empty_text(text)


def test_no_opener_has_as_many_letters_as_the_texts_that_are_not_looked_at():
    openers = _EMPTY
    assert all(is_empty_text(opener) for opener in openers)
    assert not any(is_empty_text(f"{opener} {'a' * 64}") for opener in openers)
    assert max(map(len, openers)) < 64
