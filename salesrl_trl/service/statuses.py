"""What a status, or an exception of anybody's HTTP client, means: the error of this package that stands for it.

Needs no HTTP client. `http` sends requests, and `error_body` reads what an error says.
"""

import datetime
import email.utils
import re
import time
from collections.abc import Iterable, Mapping
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
        error = ServiceRejected(
            f"{service} redirects ({status}), which is not followed: customers' text goes to the configured "
            "address only. Configure the address it redirects to.",
            code,
        )
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
    return (
        "credentials or a query (an @, ? or #). Expected an address without them, which a path is appended to, and "
        "which logs and errors name. Keys go into an environment variable"
    )


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds for which the service asks for no calls; `None` if it does not say. Reads `Retry-After-Ms`, and
    `Retry-After` as seconds, with a unit (`"1500ms"`, `"2s"`), or as an HTTP date from the answer's own `Date` on."""
    milliseconds = _number(headers.get("retry-after-ms", ""))
    if milliseconds is not None:
        return milliseconds / 1000
    text = headers.get("retry-after", "").strip()
    for unit, seconds_each in (("ms", 0.001), ("s", 1.0), ("", 1.0)):
        number = _number(text.removesuffix(unit)) if text.endswith(unit) else None
        if number is not None:
            return number * seconds_each
    moment = _moment(text)
    if moment is None:
        return None
    return max(moment - (_moment(headers.get("date", "")) or time.time()), 0.0)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None


def _moment(text: str) -> float | None:
    """Seconds since the epoch of an HTTP date."""
    try:
        moment = email.utils.parsedate_to_datetime(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=datetime.UTC)
        return moment.timestamp()
    except (ValueError, OverflowError):
        return None
