"""Texts that say nothing, yet make judges generous.

A lone colon or "Thought process:" is scored as a good answer by many a judge, in up to 80-90 % of cases
(arXiv:2507.08794, table 1). Owns the list. Such a text is turned away before a judge sees it.
"""

import re
import unicodedata

_OPENERS = """
    thought process|thinking process|let's solve this problem step by step|let us solve this problem step by step|
    let's think step by step|step 1|step by step|solution|the solution|answer|the answer|final answer|
    the final answer is|answer is|the answer is|response|explanation|reasoning|analysis|conclusion|verdict|result|
    output|okay|ok|sure|here is the answer|here is my answer|as an ai language model|n/a|none|null|
    解|答|答案|解答|回答|思考过程|分析|结论|最终答案|让我们一步一步解决这个问题|让我们一步步思考|好的|かいせつ|解説|respuesta|
    solución|lösung|antwort|réponse
"""
_HOLLOW = frozenset(opener.strip() for opener in _OPENERS.replace("\n", "").split("|"))
_WORD = re.compile(r"[^\W_]")
_MANY_LETTERS = re.compile(r"(?:[^0-9A-Za-z\u4e00-\u9fff]*+[0-9A-Za-z\u4e00-\u9fff]){64}")
"""Matches a text with more plain letters than any opener has. Normalisation keeps plain letters as they are."""
_LONG_GAP = re.compile(r"([\W_]{64})[\W_]+")
MAX_OPENER_CHARS = 4096
"""Longer texts, long gaps between words aside, say more than any of these."""


def is_empty_text(text: str) -> bool:
    """Whether a text is empty, holds no letter and no digit, or is one of the known openers alone. Width, case,
    markup around it and invisible characters make no difference.

    Only 64 characters of a gap between words are read: the time to normalise combining marks grows with the square of
    their number.
    """
    if _MANY_LETTERS.match(text):  # usual answers, of which there are thousands in a step
        return False
    text = _LONG_GAP.sub(r"\1", text)
    if len(text) > MAX_OPENER_CHARS:
        return False
    plain = unicodedata.normalize("NFKC", text).casefold().replace("’", "'")
    seen = "".join(character for character in plain if unicodedata.category(character) != "Cf")
    first, last = _WORD.search(seen), _WORD.search(seen[::-1])
    if first is None or last is None:
        return True
    return re.sub(r"\s+", " ", seen[first.start() : len(seen) - last.start()]) in _HOLLOW
