"""From a completion to an `Action`, or to the reason why it is none.

Owns what counts as a valid action. Strict on purpose: what is let through here is learnt by the policy.
"""

import json

from salesrl_trl.data.rows import is_unicode
from salesrl_trl.reward.empty_answers import is_hollow
from salesrl_trl.types import DEFAULT_FORMAT, Action, ActionFormat, InvalidAction

INVALID_REASONS = ("empty", "not_json", "not_an_object", "missing_field", "extra_field", "wrong_type", "not_unicode",
                   "empty_query", "too_long", "hollow_answer")  # fmt: skip
"""Every `InvalidAction.reason`; each becomes a metric, so the set is closed. The chain sets
`hollow_answer`: the action led to an answer that says nothing."""

MAX_FIELD_CHARS = 4000
"""Longest field that is sent to a RAG service; the embedded one refuses more with a 422."""

MAX_COMPLETION_CHARS = 200_000
"""Longest completion that is read. Three such fields fit, even if JSON spells each character with 12."""


def parse_action(completion: str, wanted: ActionFormat = DEFAULT_FORMAT) -> Action | InvalidAction:
    """Read a completion: the policy's text without special tokens. White space around it and one Markdown code fence
    are forgiven, nothing else. Never raises."""
    text = completion.strip()
    if not text:
        return InvalidAction(reason="empty")
    if len(text) > MAX_COMPLETION_CHARS:
        return InvalidAction(reason="too_long")
    try:
        value = json.loads(_unfenced(text))
    except (ValueError, RecursionError):  # ValueError also for a number of more than 4,300 digits
        return InvalidAction(reason="not_json")
    reason = _fault(value, wanted)
    if reason:
        return InvalidAction(reason=reason)
    return Action(fields={name: value[name] for name in wanted.fields}, query_field=wanted.query)


def _unfenced(text: str) -> str:
    """The content of a Markdown code fence around the whole text, else the text. No regular expression: its time would
    grow with the square of the number of blank lines."""
    if not (text.startswith("```") and text.endswith("\n```")):
        return text
    first, _, content = text[3:-4].removeprefix("json").partition("\n")
    return text if first.strip() else content


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
    if is_hollow(value[wanted.query]):
        return "empty_query"
    return None
