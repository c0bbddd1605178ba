"""One call to one service: how often, how long, how many at once.

The only owner of retries, attempt timeouts and concurrency for RAG services and judges: the client libraries' own
retries are off. The deadline of a whole reward phase is the chain's, which cancels what is still in flight here.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import httpx2
import openai
import stamina

from salesrl_trl.errors import BadServiceResponse, ServiceError, ServiceRejected, ServiceTimeout, ServiceUnavailable

T = TypeVar("T")

RETRYABLE_STATUS = frozenset({408, 409, 429})
"""The 4xx that another attempt can mend; every 5xx can be tried again too."""
RETRY_WAIT_INITIAL_S = 0.2
RETRY_WAIT_MAX_S = 5.0
"""Longest wait between attempts, unless the service asks for more by Retry-After."""


class Transport:
    """Runs attempts against one service until one succeeds or the attempts are used up.

    Not tied to an event loop until the first call, and to one loop from then on.

    Args:
        service (`str`):
            Name in errors and reason codes, for example `"rag_8b"`.
        max_concurrency (`int`):
            Attempts in flight at once.
        attempt_timeout_s (`float`):
            Seconds one attempt may take, body included. Waiting for a free slot does not count.
        max_attempts (`int`):
            Attempts in all, the first included.
    """

    def __init__(self, service: str, *, max_concurrency: int, attempt_timeout_s: float, max_attempts: int) -> None:
        self.service = service
        self.max_concurrency = max_concurrency
        self.attempt_timeout_s = attempt_timeout_s
        self.max_attempts = max_attempts
        self._slots: anyio.CapacityLimiter | None = None

    async def call(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Run `attempt` until it succeeds.

        Args:
            attempt (`Callable[[], Awaitable[T]]`):
                Sends one request and reads the whole answer. May raise what `httpx2` and `openai` raise.

        Raises:
            `ServiceError`: of the last attempt; its `code` starts with the service's name.
        """
        retries = stamina.retry_context(
            on=_backoff,
            attempts=self.max_attempts,
            timeout=None,
            wait_initial=RETRY_WAIT_INITIAL_S,
            wait_max=RETRY_WAIT_MAX_S,
        )
        async for retry in retries:
            with retry:
                return await self._once(attempt)
        raise AssertionError("stamina ends by returning or raising")

    async def _once(self, attempt: Callable[[], Awaitable[T]]) -> T:
        if self._slots is None:
            self._slots = anyio.CapacityLimiter(self.max_concurrency)
        async with self._slots:
            try:
                async with asyncio.timeout(self.attempt_timeout_s):
                    return await attempt()
            except (TimeoutError, httpx2.TimeoutException, openai.APITimeoutError) as error:
                raise ServiceTimeout(
                    f"{self.service} gave no complete answer within {self.attempt_timeout_s:g} s",
                    code=f"{self.service}_timeout",
                ) from error
            except httpx2.HTTPStatusError as error:
                raise self._status_error(error.response.status_code, error.response.headers) from None
            except openai.APIStatusError as error:
                raise self._status_error(error.status_code, error.response.headers) from None
            except (httpx2.TransportError, openai.APIConnectionError) as error:
                raise ServiceUnavailable(
                    f"{self.service} could not be reached ({type(error).__name__}): is it running at the configured "
                    f"address?",
                    code=f"{self.service}_unavailable",
                ) from error
            except (httpx2.HTTPError, openai.OpenAIError, json.JSONDecodeError) as error:
                # `from None`: the decoding errors hold the body
                raise BadServiceResponse(
                    f"{self.service} answered with a body that is not the expected JSON ({type(error).__name__})",
                    code=f"{self.service}_bad_response",
                ) from None

    def _status_error(self, status: int, headers: httpx2.Headers) -> ServiceError:
        """The error for an HTTP status. Bodies stay out of it: providers echo keys and customers' text in them."""
        if status in RETRYABLE_STATUS or status >= 500:
            error = ServiceUnavailable(f"{self.service} answered {status}", code=f"{self.service}_http_{status}")
            error.retry_after_s = _retry_after_s(headers)
            return error
        return ServiceRejected(
            f"{self.service} answered {status}: no retry will mend it. Check the address, the key and the request.",
            code=f"{self.service}_http_{status}",
        )


def _backoff(error: Exception) -> bool | float:
    """Whether to try again, and after how many seconds when the service said so."""
    if isinstance(error, ServiceUnavailable):
        return True if error.retry_after_s is None else error.retry_after_s
    return isinstance(error, ServiceTimeout)


def _retry_after_s(headers: httpx2.Headers) -> float | None:
    """Retry-After in seconds, where it is a number of seconds."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None
