"""Half a surrogate pair in a text of others."""

from collections import Counter

import pytest

from salesrl_trl.ground import texts
from salesrl_trl.ground.texts import encodable, is_unicode

HALF, WHOLE = "half \ud83d pair", "half \ufffd pair"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (HALF, WHOLE),
        ("\ude00", "\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),  # two halves that stand together, as Python may join them
        ({HALF: [1, None, {"a": (HALF, 2.5)}]}, {WHOLE: [1, None, {"a": (WHOLE, 2.5)}]}),
    ],
    ids=["high", "low", "both", "nested"],
)
def test_half_a_surrogate_pair_is_replaced_and_the_rest_stays(value, expected):
    assert encodable(value, "a test") == expected
    assert is_unicode(expected)


def test_a_value_that_can_be_encoded_is_the_same_object():
    value = {"text": "你好 \U0001f600", "parts": ["a", 1, b"\xff"]}
    assert encodable(value, "a test") is value


def test_values_with_half_a_pair_are_counted_by_source_without_their_text(caplog, monkeypatch):
    monkeypatch.setattr(texts, "_replaced", Counter())
    for source in ("a reply of judge",) * 10 + ("a row",):
        encodable([HALF], source)
    told = [(message.split(" contains")[0], message.split("(")[1]) for message in caplog.messages]
    assert told == [
        ("[Text] a reply of judge", "1 so far)"),
        ("[Text] a reply of judge", "10 so far)"),
        ("[Text] a row", "1 so far)"),
    ]
    assert "\ufffd" not in caplog.text and "\ud83d" not in caplog.text
