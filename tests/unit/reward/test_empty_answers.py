"""Texts that say nothing."""

import pytest

from salesrl_trl.reward import parsing as empty_answers
from salesrl_trl.reward.parsing import is_empty_text

# The master keys of arXiv:2507.08794, table 1, and their variants in width, case, markup and invisible characters.
MASTER_KEYS = (
    "",
    " ",
    "\n\t",
    ".",
    ",",
    ":",
    "。",
    "……",
    "—",
    "()",
    "{}",
    "Thought process:",
    "thought process",
    "**Thought process:**",
    "Ｔｈｏｕｇｈｔ　ｐｒｏｃｅｓｓ：",
    "Thought\u200b process:",
    "Let's solve this problem step by step.",
    "Let’s solve this problem step by step.",
    "Solution",
    "## Solution:",
    "解",
    "解：",
    "かいせつ",
    "Respuesta",
    "The answer is:",
    "OK!",
    "思考过程：",
    "\u200b\u200d\ufeff",
)


@pytest.mark.parametrize("text", MASTER_KEYS, ids=repr)
def test_a_master_key_is_hollow(text):
    assert is_empty_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "5980",
        "The course costs 5980 yuan.",
        "解：五千九百八十元",
        "Solution: call us on Monday",
        "好的，周六上课",
        "A",
    ],
)
def test_an_answer_is_not(text):
    assert not is_empty_text(text)


def test_no_opener_has_as_many_letters_as_the_texts_that_are_not_looked_at():
    openers = empty_answers._EMPTY
    assert all(is_empty_text(opener) for opener in openers)
    assert not any(is_empty_text(f"{opener} {'a' * 64}") for opener in openers)
    assert max(map(len, openers)) < 64
