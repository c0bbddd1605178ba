"""What a status, an error's body, or an exception of anybody's HTTP client means: the error that stands for it.

Pure. Of a body it keeps names of the request's own fields, known marks and numbers: providers echo keys and customers'
texts in their messages.
"""

import datetime
import email.utils
import json
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from salesrl_trl.errors import (
    AccessDenied,
    ServiceError,
    ServiceOverloaded,
    ServiceRejected,
    ServiceTimeout,
    ServiceUnavailable,
)

QUOTA_MARKS = frozenset(
    {"insufficient_quota", "billing_hard_limit_reached", "quota_exceeded", "insufficient_balance", "arrearage",
     "exceeded_current_quota_error", "budget_exceeded"}
)  # fmt: skip
"""Values of `code` or `type` with which OpenAI-compatible providers say that a retry is useless."""
OVERLOAD_STATUS = frozenset({429, 529})  # too many requests. Some providers answer 529 when they are overloaded.
RETRYABLE_STATUS = frozenset({408, 409, 425})
"""The other 4xx for which a later attempt may succeed. For every 5xx it may, too."""
DENIED_STATUS = frozenset({401, 402})
"""These hold for every call. A 403 is not among them: it may be about the rights of one tenant or contact."""
_API_VERSION = re.compile(r"\?api-version=[\w.-]+$")  # of Azure's addresses, which every request has
_LATE = frozenset({"TimeoutError", "TimeoutException", "Timeout", "APITimeoutError"})
_BROKEN = frozenset({"ConnectionError", "ClientConnectionError", "ClientPayloadError", "TransportError", "URLError",
                     "APIConnectionError", "gaierror"})  # fmt: skip
"""Exceptions of aiohttp, httpx, requests, urllib and the `openai` client, by name: not all of them are installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorBody:
    """What is kept of an error's body. Example: OpenAI's refusal of a temperature has `refused={"temperature"}`."""

    status: int | None = None  # of an error inside a 200
    marks: frozenset[str] = frozenset()  # its `code`, `type` and `status`, in lower case
    refused: frozenset[str] = frozenset()  # fields of the request that the service does not take
    named: frozenset[str] = frozenset()  # fields of the request that it finds fault with
    wait_s: float | None = None


NOTHING_SAID = ErrorBody()


def service_error_of(service: str, error: BaseException) -> ServiceError | None:
    """The error for what the HTTP client of somebody's own code raised: by its status, or as a timeout or a lost
    connection. `None` for what is none of these. It quotes nothing of the exception."""
    response = getattr(error, "response", None)
    given = (getattr(source, name, None) for source in (error, response) for name in ("status", "status_code"))
    status = next((value for value in given if isinstance(value, int) and 300 <= value < 600), None)
    if status is not None:
        headers = getattr(response, "headers", None) or getattr(error, "headers", None)
        items: Iterable[tuple[object, object]] = getattr(headers, "items", tuple)()  # some have another form
        return status_error(service, status, {str(name).lower(): str(value) for name, value in items})
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & _LATE:
        return ServiceTimeout(f"{service} timed out", f"{service}_timeout")
    if names & _BROKEN:
        return ServiceUnavailable(f"{service} found no connection", f"{service}_unavailable")
    return None


def status_error(
    service: str, status: int, headers: Mapping[str, str], said: ErrorBody = NOTHING_SAID
) -> ServiceError:
    """The error for a status. It quotes no body: providers echo keys and customers' text in bodies."""
    code, wait_s = f"{service}_http_{status}", retry_after_s(headers)
    wait_s = said.wait_s if wait_s is None and status in (*OVERLOAD_STATUS, 503) else wait_s
    error: ServiceError
    if said.marks & QUOTA_MARKS:
        error = AccessDenied(f"{service} says that its quota is used up ({status})", f"{service}_quota")
    elif status in DENIED_STATUS:
        error = AccessDenied(f"{service} refuses access ({status}): check the key and its rights.", code)
    elif status in OVERLOAD_STATUS or (status >= 500 and wait_s is not None):
        error = overloaded = ServiceOverloaded(f"{service} is overloaded ({status})", code)
        overloaded.retry_after_s = wait_s
        overloaded.is_outage = status not in OVERLOAD_STATUS
    elif status in RETRYABLE_STATUS or status >= 500:
        error = ServiceUnavailable(f"{service} answered {status}", code)
    elif 300 <= status < 400:
        text = f"{service} redirects ({status}), which is not followed: texts go to the configured address."
        error = ServiceRejected(text, code)
    else:
        named = f" It finds fault with the request's {', '.join(sorted(said.named))}." if said.named else ""
        text = f"{service} answered {status}: no retry will mend it.{named} Check the address and the request."
        error = ServiceRejected(text, code)
    if isinstance(error, ServiceRejected):
        error.marks, error.refused = said.marks, said.refused
    error.status = status
    return error


def address_fault(url: str) -> str | None:
    """Names what an address must not hold, without showing it; `None` if there is nothing of that kind."""
    if re.search(r"[@?#]", _API_VERSION.sub("", url)) is None:
        return None
    return "credentials or a query (an @, ? or #). Expected none: logs name it. Keys go into an environment variable"


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds for which the service asks for no calls; `None` if it does not say. Reads `Retry-After-Ms`, and
    `Retry-After` as seconds, with a unit (`"1500ms"`, `"2s"`), or as an HTTP date from the answer's own `Date` on."""
    text = headers.get("retry-after", "")
    seconds = _seconds(f"{headers.get('retry-after-ms', '')}ms")
    seconds = _seconds(text) if seconds is None else seconds
    if seconds is not None or (moment := _moment(text)) is None:
        return seconds
    return max(moment - (_moment(headers.get("date", "")) or time.time()), 0.0)


def _moment(text: str) -> float | None:
    try:
        moment = email.utils.parsedate_to_datetime(text.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def _seconds(text: str) -> float | None:
    """`"1.5s"`, `"1m2.5s"`, `"250ms"` or `"20"` in seconds."""
    if not re.fullmatch(r"(\d+(\.\d+)?(ms|[smh]))+|\d+(\.\d+)?", text := text.strip()):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+(?:\.\d+)?)(ms|[smh]|$)", text))


WITHHELD_MARKS = frozenset(  # of a text that a filter withheld: it says nothing about other requests
    {"content_filter", "content_policy_violation", "responsibleaipolicyviolation", "data_inspection_failed"}
)
UNKNOWN_MODEL = "model_not_found"  # this mark stands for all ways to say so
STATUS_OF = {
    "rate_limit_exceeded": 429, "rate_limit_error": 429, "resource_exhausted": 429, "too_many_requests": 429,
    "rate_limited": 429, "throttled": 429, "overloaded_error": 529, "authentication_error": 401,
    "invalid_api_key": 401, "unauthenticated": 401, "payment_required": 402, "insufficient_credits": 402,
    "permission_denied": 403, "permission_error": 403, "unavailable": 503, "internal": 500, "server_error": 500,
    "internal_server_error": 500, "api_error": 500, "deadline_exceeded": 504,
}  # fmt: skip
"""Statuses by the `code`, `type` or `status` of an error, in lower case."""
SHOWN_CHARS = 1000  # characters of a message in which a refusal is looked for
LIMITS = frozenset({"max_completion_tokens", "max_tokens"})
"""Fields whose value may be wrong for one request. Any complaint about another, a temperature say, refuses it."""

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
_WORDS = ("message", "msg", "error", "errors", "detail", "details", "title", "description", "raw", "type", "code")
"""Where an error speaks. `input`, `failed_generation` or `flagged_input` hold a customer's or a model's text."""
_ECHO = re.compile(r"['\"]?\b(?:input|input_value|failed_generation|flagged_input)['\"]?[:=]")
_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
_UNIT = r"(?:ms|milliseconds?|s(?:ec(?:ond)?s?)?|m(?:in(?:ute)?s?)?|h(?:ours?)?)(?![a-z])"
_AGAIN = re.compile(rf"(?:again|retry|wait)\b[^.\d]{{0,30}}((?:\d{{1,9}}(?:\.\d{{1,9}})? ?{_UNIT})+)", re.IGNORECASE)


def read_error(content: bytes | object, sent: Collection[str] = ()) -> ErrorBody:
    """Read an error: the bytes of a body, or its JSON value. `sent`: the request's fields."""
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
    named = _named(objects, text, frozenset(sent) - {"model", "messages"})
    refused = frozenset() if marks & WITHHELD_MARKS else named
    is_of_value = _OF_VALUE.search(text) or not (_REFUSES.search(text) or any(map(_REFUSES.search, marks)))
    if is_of_value and not any("unsupported" in mark or "unknown" in mark for mark in marks):
        refused -= LIMITS
    status = next((STATUS_OF[mark] for mark in sorted(marks) if mark in STATUS_OF), None)
    numbers = [
        int(mark) for mark in (*marks, *re.findall(r"^[45]\d\d\b", text)) if re.fullmatch("[45][0-9][0-9]", mark)
    ]
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
    """The fields that it names: by `param` or pydantic's `loc`, else those that its message refuses by name."""
    stated = [str(each["param"]) for each in objects if each.get("param")]
    stated += [str(part) for each in objects if isinstance(loc := each.get("loc"), list) for part in loc]
    roots = {re.split(r"[.\[]", name)[0] for name in stated}
    if fields := roots & sent:
        return frozenset(fields)
    if (roots - {"body", "None"}) & {"messages", "prompt", "model"}:
        return frozenset()
    # sentence by sentence, as an echoed text may follow; and behind `expected` are the fields that it does take
    sentences = [part for part in re.split(r"[.;\n](?!\S)|\bexpected\b", text[:SHOWN_CHARS]) if _REFUSES.search(part)]
    found = {name for name in sent if any(re.search(_by_name(name), part) for part in sentences)}
    if not found and "response_format" in sent and any(map(_SCHEMA.search, sentences)):
        found = {"response_format"}
    return frozenset(found)


def _by_name(name: str) -> str:
    """A pattern for a field that a message speaks of, as against a word of the same letters."""
    name = re.escape(name)
    before = r"(?:parameter|field|argument|name|propert(?:y|ies)|value|input|supplied)s?:?\s*"
    behind = r"\s*(?:[:=]|is\b|type\b|parameter\b|field\b|must\b|does\b|cannot\b)"
    return rf"['\"`\[{{(]{name}(?=['\"`\].\[)}}:])|{before}{name}\b|\b{name}(?={behind})"


def _wait_s(objects: list[Mapping[str, object]], text: str) -> float | None:
    """The seconds after which the service wants to be asked again, by a field or by its message."""
    for part in objects:
        for name, value in part.items():
            plain = re.sub(r"[^a-z]", "", name.lower())
            is_wait = re.fullmatch("retry(delay|after(ms|s|seconds)?)", plain) and isinstance(value, str | int | float)
            if is_wait and (seconds := _seconds(str(value))) is not None:
                return seconds / 1000 if plain.endswith("ms") else seconds
    again = _AGAIN.search(text)
    words = again[1].lower().replace("milliseconds", "ms") if again else ""
    return _seconds(re.sub(r" |(?<=[smh])(?<!ms)[a-z]{2,}", "", words))
