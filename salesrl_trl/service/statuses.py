"""Maps statuses and exceptions from any HTTP client to this package's errors. Pure."""

import datetime
import email.utils
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from salesrl_trl import errors

QUOTA_MARKS = frozenset(
    {"insufficient_quota", "billing_hard_limit_reached", "quota_exceeded", "insufficient_balance", "arrearage",
     "exceeded_current_quota_error", "budget_exceeded"}
)  # fmt: skip
"""Values of `code` or `type` by which OpenAI-compatible providers report an exhausted quota."""
OVERLOAD_STATUS = frozenset({429, 529})  # too many requests; some providers answer 529 when overloaded
RETRYABLE_STATUS = frozenset({408, 409, 425})
"""The other 4xx for which a later attempt may succeed, as for every 5xx."""
DENIED_STATUS = frozenset({401, 402})
"""These apply to every call. A 403 does not: it may concern the permissions of one tenant or contact."""
_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
_API_VERSION = re.compile(r"\?api-version=[\w.-]+$")  # required in Azure addresses
_LATE = frozenset({"TimeoutError", "TimeoutException", "Timeout", "APITimeoutError"})
_BROKEN = frozenset({"ConnectionError", "ClientConnectionError", "ClientPayloadError", "TransportError", "URLError",
                     "APIConnectionError", "gaierror"})  # fmt: skip
"""Exceptions of aiohttp, httpx, requests, urllib and the `openai` client, by name, as not all may be installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorBody:
    """A parsed error body. Example: OpenAI's rejection of a temperature has `refused={"temperature"}`."""

    status: int | None = None  # for an error inside a 200
    marks: frozenset[str] = frozenset()  # its `code`, `type` and `status`, in lower case
    refused: frozenset[str] = frozenset()  # request fields that the service does not support
    named: frozenset[str] = frozenset()  # request fields that it complains about
    wait_s: float | None = None


NOTHING_SAID = ErrorBody()


def service_error_of(service: str, error: BaseException) -> errors.ServiceError | None:
    """Convert an exception from any HTTP client, without quoting it, by its status, or as a timeout or a lost
    connection. `None` for other exceptions."""
    response = getattr(error, "response", None)
    given = (getattr(source, name, None) for source in (error, response) for name in ("status", "status_code"))
    status = next((value for value in given if isinstance(value, int) and 300 <= value < 600), None)
    if status is not None:
        headers = getattr(response, "headers", None) or getattr(error, "headers", None)
        items: Iterable[tuple[object, object]] = getattr(headers, "items", tuple)()  # not every client has it
        return status_error(service, status, {str(name).lower(): str(value) for name, value in items})
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & _LATE:
        return errors.ServiceTimeout(f"{service} timed out", f"{service}_timeout")
    if names & _BROKEN:
        return errors.ServiceUnavailable(f"{service} could not connect", f"{service}_unavailable")
    return None


def status_error(
    service: str, status: int, headers: Mapping[str, str], said: ErrorBody = NOTHING_SAID
) -> errors.ServiceError:
    """The error for a status. Never quotes the body, in which providers echo keys and customers' text."""
    code, wait_s = f"{service}_http_{status}", retry_after_s(headers)
    wait_s = said.wait_s if wait_s is None and status in (*OVERLOAD_STATUS, 503) else wait_s
    error: errors.ServiceError
    if said.marks & QUOTA_MARKS:
        error = errors.AccessDenied(f"{service} reports an exhausted quota ({status})", f"{service}_quota")
    elif status in DENIED_STATUS:
        error = errors.AccessDenied(f"{service} refuses access ({status}): check the key and its permissions.", code)
    elif status in OVERLOAD_STATUS or (status >= 500 and wait_s is not None):
        error = overloaded = errors.ServiceOverloaded(f"{service} is overloaded ({status})", code)
        overloaded.retry_after_s = wait_s
        overloaded.is_outage = status not in OVERLOAD_STATUS
    elif status in RETRYABLE_STATUS or status >= 500:
        error = errors.ServiceUnavailable(f"{service} answered {status}", code)
    elif 300 <= status < 400:
        text = f"{service} redirects ({status}), which is not followed: texts go to the configured address only."
        error = errors.ServiceRejected(text, code)
    else:
        named = f" It rejects the request's {', '.join(sorted(said.named))}." if said.named else ""
        text = f"{service} answered {status}: retrying won't help.{named} Check the address and the request."
        error = errors.ServiceRejected(text, code)
    if isinstance(error, errors.ServiceRejected):
        error.marks, error.refused = said.marks, said.refused
    error.status = status
    return error


def address_fault(url: str) -> str | None:
    """Explain what an address must not contain, without showing it; `None` if it is fine."""
    if re.search(r"[@?#]", _API_VERSION.sub("", url)) is None:
        return None
    return "credentials or a query (an @, ? or #). Expected none, as logs show it; put keys in an environment variable"


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """The requested retry delay in seconds; `None` if absent. Reads `Retry-After-Ms`, and `Retry-After` as seconds,
    with a unit (`"1500ms"`, `"2s"`), or as an HTTP date relative to the answer's own `Date`."""
    text = headers.get("retry-after", "")
    seconds = seconds_of(f"{headers.get('retry-after-ms', '')}ms")
    seconds = seconds_of(text) if seconds is None else seconds
    if seconds is not None or (moment := _moment(text)) is None:
        return seconds
    return max(moment - (_moment(headers.get("date", "")) or time.time()), 0.0)


def _moment(text: str) -> float | None:
    try:
        moment = email.utils.parsedate_to_datetime(text.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def seconds_of(text: str) -> float | None:
    """Parses `"1.5s"`, `"1m2.5s"`, `"250ms"` or `"20"`."""
    if not re.fullmatch(r"(\d+(\.\d+)?(ms|[smh]))+|\d+(\.\d+)?", text := text.strip()):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+(?:\.\d+)?)(ms|[smh]|$)", text))
