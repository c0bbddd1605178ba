"""Parses a completion into an `Action`, or the reason it is invalid.

Defines valid actions and empty texts. Strict on purpose: the policy learns whatever passes here. Used by the reward
pipeline and the checks of answers.
"""

import json
import re
import unicodedata

from salesrl_trl.ground.texts import is_unicode
from salesrl_trl.types import DEFAULT_FORMAT, Action, ActionFormat, InvalidAction

INVALID_REASONS = ("empty", "not_json", "not_an_object", "missing_field", "extra_field", "wrong_type", "not_unicode",
                   "empty_query", "too_long", "hollow_answer")  # fmt: skip
"""Every `InvalidAction.reason`; each becomes a metric, so the set is closed. The pipeline sets `hollow_answer` if an
action leads to an empty answer."""
MAX_FIELD_CHARS = 4000  # longest field sent to a RAG service; the embedded one rejects longer ones with a 422
MAX_COMPLETION_CHARS = 200_000
"""Longest completion to parse. Three such fields fit, even if JSON escapes each character with 12."""
MAX_OPENER_CHARS = 4096  # longer texts, apart from long gaps between words, exceed any of these openers
_OPENERS = """
    thought process|thinking process|let's solve this problem step by step|let us solve this problem step by step|
    let's think step by step|step 1|step by step|solution|the solution|answer|the answer|final answer|
    the final answer is|answer is|the answer is|response|explanation|reasoning|analysis|conclusion|verdict|result|
    output|okay|ok|sure|here is the answer|here is my answer|as an ai language model|n/a|none|null|
    解|答|答案|解答|回答|思考过程|分析|结论|最终答案|让我们一步一步解决这个问题|让我们一步步思考|好的|かいせつ|解説|respuesta|
    solución|lösung|antwort|réponse
"""
_EMPTY = frozenset(opener.strip() for opener in _OPENERS.replace("\n", "").split("|"))
_WORD = re.compile(r"[^\W_]")
_MANY_LETTERS = re.compile(r"(?:[^0-9A-Za-z\u4e00-\u9fff]*+[0-9A-Za-z\u4e00-\u9fff]){64}")
"""Matches a text with more plain letters than any opener. Normalisation preserves plain letters."""
_LONG_GAP = re.compile(r"([\W_]{64})[\W_]+")


def parse_action(completion: str, wanted: ActionFormat = DEFAULT_FORMAT) -> Action | InvalidAction:
    """Parse a completion without special tokens. Tolerates only surrounding whitespace and one Markdown code fence.
    Never raises."""
    text = completion.strip()
    if not text:
        return InvalidAction(reason="empty")
    if len(text) > MAX_COMPLETION_CHARS:
        return InvalidAction(reason="too_long")
    # a regular expression for the fence would take quadratic time in the number of blank lines
    if text.startswith("```") and text.endswith("\n```"):
        language, _, content = text[3:-4].removeprefix("json").partition("\n")
        text = text if language.strip() else content
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # ValueError also covers numbers of more than 4,300 digits
        return InvalidAction(reason="not_json")
    if reason := _fault(value, wanted):
        return InvalidAction(reason=reason)
    return Action(fields={name: value[name] for name in wanted.fields}, query_field=wanted.query)


def _fault(value: object, wanted: ActionFormat) -> str | None:
    if not isinstance(value, dict):
        return "not_an_object"
    if any(name not in value for name in wanted.fields):
        return "missing_field"
    if len(value) > len(wanted.fields):
        return "extra_field"
    if not all(isinstance(field, str) for field in value.values()):
        return "wrong_type"
    if not all(is_unicode(field) for field in value.values()):
        return "not_unicode"
    if any(len(field) > MAX_FIELD_CHARS for field in value.values()):
        return "too_long"
    if is_empty_text(value[wanted.query]):
        return "empty_query"
    return None


def is_empty_text(text: str) -> bool:
    """Whether a text contains neither letters nor digits, or only a known opener, regardless of width and case.

    Judges score a lone colon or "Thought process:" as a good answer in up to 80-90 % of cases (arXiv:2507.08794,
    table 1). Gaps between words are truncated to 64 characters: normalising combining marks costs quadratic time.
    """
    if _MANY_LETTERS.match(text):  # typical answers, thousands per step
        return False
    text = _LONG_GAP.sub(r"\1", text)
    if len(text) > MAX_OPENER_CHARS:
        return False
    plain = unicodedata.normalize("NFKC", text).casefold().replace("’", "'")
    seen = "".join(character for character in plain if unicodedata.category(character) != "Cf")
    first, last = _WORD.search(seen), _WORD.search(seen[::-1])
    if first is None or last is None:
        return True
    return re.sub(r"\s+", " ", seen[first.start() : len(seen) - last.start()]) in _EMPTY
