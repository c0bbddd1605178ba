"""Parses error bodies.

Pure. Keeps only names of the request's own fields, known codes and numbers, because providers echo keys and customers'
texts in their messages.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping

from salesrl_trl.service.statuses import ErrorBody, seconds_of

WITHHELD_MARKS = frozenset(  # a content filter withheld this text; other requests are unaffected
    {"content_filter", "content_policy_violation", "responsibleaipolicyviolation", "data_inspection_failed"}
)
UNKNOWN_MODEL = "model_not_found"  # canonical mark for every phrasing
STATUS_OF = {
    "rate_limit_exceeded": 429, "rate_limit_error": 429, "resource_exhausted": 429, "too_many_requests": 429,
    "rate_limited": 429, "throttled": 429, "overloaded_error": 529, "authentication_error": 401,
    "invalid_api_key": 401, "unauthenticated": 401, "payment_required": 402, "insufficient_credits": 402,
    "permission_denied": 403, "permission_error": 403, "unavailable": 503, "internal": 500, "server_error": 500,
    "internal_server_error": 500, "api_error": 500, "deadline_exceeded": 504,
}  # fmt: skip
"""Statuses by an error's `code`, `type` or `status`, in lower case."""
SHOWN_CHARS = 1000  # characters of a message that are searched for rejected fields
LIMITS = frozenset({"max_completion_tokens", "max_tokens"})
"""Fields whose value may be wrong for one request only. A complaint about any other field, e.g. `temperature`, rejects
the field."""

_REFUSES = re.compile(
    r"unsupported|(?:not|n't|no longer) (?:support|permit|allow|available|a valid)|unrecognized|unknown|unexpected"
    r"|extra|forbid|unavailable|deprecated|cannot|only \S+ (?:is|are) (?:allowed|supported)|additional propert|invalid"
    r"|instead|enabled only|(?:must|should) be",
    re.IGNORECASE,
)
_OF_VALUE = re.compile(
    r"too (?:large|long|high)|at (?:most|least)|m(?:ax|in)imum|exceed|(?:less|greater) than|context|range"
    r"|(?:must|should) be",
    re.IGNORECASE,
)
_SCHEMA = re.compile(r"json[_ ]schema|guided|structured[ _]outputs?|grammar|response[ _]formats?", re.IGNORECASE)
_NO_MODEL = re.compile(
    r"(?:model|deployment)\b.{0,160}(?:not (?:be )?found|not exist|not a valid)|not a valid model"
    r"|(?:invalid|unknown) model",
    re.IGNORECASE | re.DOTALL,
)
_NO_CREDIT = re.compile(
    r"(?:credit|account) balance\b.{0,40}\b(?:low|insufficient|exhausted)|insufficient (?:credit|balance|funds)",
    re.IGNORECASE,
)
_WORDS = ("message", "msg", "error", "errors", "detail", "details", "title", "description", "raw", "type", "code")
"""Fields with the error's message. `input`, `failed_generation` and `flagged_input` quote a customer or a model."""
_ECHO = re.compile(r"['\"]?\b(?:input|input_value|failed_generation|flagged_input)['\"]?[:=]")
_UNIT = r"(?:ms|milliseconds?|s(?:ec(?:ond)?s?)?|m(?:in(?:ute)?s?)?|h(?:ours?)?)(?![a-z])"
_AGAIN = re.compile(rf"(?:again|retry|wait)\b[^.\d]{{0,30}}((?:\d{{1,9}}(?:\.\d{{1,9}})? ?{_UNIT})+)", re.IGNORECASE)


def read_error(content: bytes | object, sent: Collection[str] = ()) -> ErrorBody:
    """Parse an error from the bytes of a body or its JSON value. `sent`: the request's fields."""
    value: object = content
    if isinstance(content, bytes):
        text = content.decode(errors="replace")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
    objects = [*_objects(value)]
    marks = frozenset(
        str(each[name]).lower()
        for each in objects for name in ("code", "type", "status") if isinstance(each.get(name), str | int)
    )  # fmt: skip
    text = " ".join(each for part in objects for name in _WORDS if isinstance(each := part.get(name), str))
    text = _ECHO.split(value if isinstance(value, str) else text)[0]
    if _NO_MODEL.search(text) or "deploymentnotfound" in marks:
        marks |= {UNKNOWN_MODEL}
    if _NO_CREDIT.search(text[:120]):  # not what it may echo; some providers answer a plain 400
        marks |= {"insufficient_balance"}
    named = _named(objects, text, frozenset(sent) - {"model", "messages"})
    refused = frozenset() if marks & WITHHELD_MARKS else named
    is_of_value = _OF_VALUE.search(text) or not (_REFUSES.search(text) or any(map(_REFUSES.search, marks)))
    if is_of_value and not any("unsupported" in mark or "unknown" in mark for mark in marks):
        refused -= LIMITS
    status = next((STATUS_OF[mark] for mark in sorted(marks) if mark in STATUS_OF), None)
    stated = (*marks, *re.findall(r"^[45]\d\d\b", text))
    numbers = [int(mark) for mark in stated if re.fullmatch("[45][0-9][0-9]", mark)]
    wait_s = _wait_s(objects, text)
    return ErrorBody(status=max(numbers, default=status), marks=marks, refused=refused, named=named, wait_s=wait_s)


def _objects(value: object, depth: int = 4) -> Iterator[Mapping[str, object]]:
    """The objects of an error: itself, and those inside of it where providers put them."""
    if isinstance(value, str) and depth < 4 and value.lstrip()[:1] == "{":  # OpenRouter's `metadata.raw`
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return
    if isinstance(value, list):
        for part in value[:8]:
            yield from _objects({"message": part} if isinstance(part, str) else part, depth - 1)
    elif isinstance(value, Mapping):
        yield value
        for name in ("error", "errors", "detail", "details", "message", "metadata", "headers", "raw", "innererror"):
            if depth and (inner := value.get(name)):
                yield from _objects(inner, depth - 1)


def _named(objects: list[Mapping[str, object]], text: str, sent: frozenset[str]) -> frozenset[str]:
    """The fields that it names: in `param` or pydantic's `loc`, otherwise those that its message rejects by name."""
    stated = [str(each["param"]) for each in objects if each.get("param")]
    stated += [str(part) for each in objects if isinstance(loc := each.get("loc"), list) for part in loc]
    roots = {re.split(r"[.\[]", name)[0] for name in stated}
    if fields := roots & sent:
        return frozenset(fields)
    if (roots - {"body", "None"}) & {"messages", "prompt", "model"}:
        return frozenset()
    # sentence by sentence, as an echoed text may follow; and after `expected` come the fields that it supports
    sentences = [part for part in re.split(r"[.;\n](?!\S)|\bexpected\b", text[:SHOWN_CHARS]) if _REFUSES.search(part)]
    found = {name for name in sent if any(re.search(_by_name(name), part) for part in sentences)}
    if not found and "response_format" in sent and any(map(_SCHEMA.search, sentences)):
        found = {"response_format"}
    return frozenset(found)


def _by_name(name: str) -> str:
    """A pattern that matches a field's name but not the same word in ordinary text."""
    name = re.escape(name)
    before = r"(?:parameter|field|argument|name|propert(?:y|ies)|value|input|supplied)s?:?\s*"
    behind = r"\s*(?:[:=]|is\b|type\b|parameter\b|field\b|must\b|does\b|cannot\b)"
    return rf"['\"`\[{{(]{name}(?=['\"`\].\[)}}:])|{before}{name}\b|\b{name}(?={behind})"


def _wait_s(objects: list[Mapping[str, object]], text: str) -> float | None:
    """The requested retry delay in seconds, from a field or from the message."""
    for part in objects:
        for name, value in part.items():
            plain = re.sub(r"[^a-z]", "", name.lower())
            is_wait = re.fullmatch("retry(delay|after(ms|s|seconds)?)", plain) and isinstance(value, str | int | float)
            if is_wait and (seconds := seconds_of(str(value))) is not None:
                return seconds / 1000 if plain.endswith("ms") else seconds
    again = _AGAIN.search(text)
    words = again[1].lower().replace("milliseconds", "ms") if again else ""
    return seconds_of(re.sub(r" |(?<=[smh])(?<!ms)[a-z]{2,}", "", words))
