"""One HTTP request to one service: returns its answer, or raises a specific error.

aiohttp reuses kept-alive connections that hold unread bytes, so a stray reply would answer the next request. Here a
connection is reused only if it delivered exactly one reply to its last request and nothing since. A stray reply that
arrives after the next request can't be recognised by its bytes, so every request carries an id, and each request to a
judge a nonce.
"""

import asyncio
import json
import re
import secrets
import select
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http import RawResponseMessage
from aiohttp.streams import StreamReader
from aiohttp.tracing import Trace

from salesrl_trl import errors
from salesrl_trl.ground.texts import encodable
from salesrl_trl.service import statuses
from salesrl_trl.service.error_bodies import read_error
from salesrl_trl.service.event_loop import PerLoop
from salesrl_trl.telemetry.completion_record import CallNote

KEEPALIVE_S = 60.0  # lifetime of an idle connection: longer than an optimizer step


def open_session() -> aiohttp.ClientSession:
    """A session on the running loop, without proxies, cookies or limits."""
    return aiohttp.ClientSession(
        connector=_Connector(),
        response_class=WiredResponse,
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,  # ignores proxy variables: customers' text goes to the configured address only
    )


class WiredResponse(aiohttp.ClientResponse):
    """A response whose connection can be closed even after its release: if it delivered the reply to another request,
    its next reply would be wrong too."""

    wire: ResponseHandler | None = None

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        self.wire = connection.protocol
        return await super().start(connection)

    def hang_up(self) -> None:
        if self.wire is not None:
            self.wire.abort()


class _Wire(ResponseHandler):
    """A connection that, unlike aiohttp's, closes at the first byte beyond the reply to its latest request."""

    was_used = False
    _reply: StreamReader | None = None  # the reply to the latest request, once its headers have arrived
    _holds_more = False

    def set_response_params(self, **settings: Any) -> None:
        self.was_used, self._reply = True, None
        super().set_response_params(**settings)

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        if self._reply is not None:
            self._holds_more = True  # a second reply, which is ignored
            return
        if data[0].code >= 200:  # a 1xx precedes the reply
            self._reply = data[1]
        super().feed_data(data, size)

    def data_received(self, data: bytes) -> None:
        if data and not self._is_waiting:
            self.abort()
            return
        super().data_received(data)
        if not self._is_waiting and (self._holds_more or self._began_another()):
            self.abort()  # the reply itself remains readable

    @property
    def is_fresh(self) -> bool:
        """Whether no byte has arrived that a request sent now could mistake for its reply."""
        if self.transport is None or self.should_close:
            return False
        if not self.was_used and self.transport.get_extra_info("sslcontext"):
            return True  # TLS itself starts by sending session tickets
        unread = select.poll()
        unread.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not unread.poll(0)

    @property
    def _is_waiting(self) -> bool:
        """Whether the reply to a request is still incomplete."""
        return self.was_used and (self._reply is None or not self._reply.is_eof())

    def _began_another(self) -> bool:
        """Whether the parser holds the start of another reply. Each request has its own parser."""
        try:
            return self._parser is not None and self._parser.feed_eof() is not None
        except Exception:  # any parser error means that it does
            return True


class _Connector(aiohttp.TCPConnector):
    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=KEEPALIVE_S)  # 0: the transport limits
        self._factory = cast("partial[ResponseHandler]", partial(_Wire, loop=self._loop))

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        """A connection without unread bytes; those with unread bytes are closed and replaced."""
        while True:
            connection = await super().connect(req, traces, timeout)
            wire = cast(_Wire, connection.protocol)
            if wire.is_fresh:
                return connection
            connection.close()
            if not wire.was_used:
                raise aiohttp.ClientConnectionError("the service sent data before any request")


MAX_BODY_BYTES = 4 * 1024 * 1024  # largest accepted answer: fifty long passages are a tenth of it
MAX_ERROR_BODY_BYTES = 64 * 1024  # largest error body that is parsed
_READ_STATUS = frozenset({400, 401, 402, 403, 404, 422, 429, 500, 503, 529})
"""Error statuses whose body is parsed: it may name a field, a quota, or a retry delay."""
REQUEST_ID_HEADER = "X-Request-Id"  # some services echo it
_REQUEST_ID = re.compile(r"salesrl-[0-9a-f]{16}")

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # an escaped surrogate, possibly part of a pair
T = TypeVar("T")
FAILED_WORDS = frozenset(
    {"error", "failed", "failure", "fail", "busy", "overloaded", "unavailable", "timeout", "throttled", "rate_limited"}
)
"""Values of `status` in an answer, in lower case, that report a failure."""


class HttpClient:
    """Sends JSON to one service and returns the body of a 200.

    The key is sent as a bearer token; `headers` are for services that expect it elsewhere. Raises `ConfigError`,
    without quoting them, if a value can't be sent in a header or the address contains credentials or a query.
    """

    def __init__(
        self, service: str, base_url: str, *, api_key: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        if fault := statuses.address_fault(base_url):
            raise errors.ConfigError(f"the address of {service} contains {fault}.")
        self.service = service
        base, _, query = base_url.partition("?")
        self._base_url, self._query = base.rstrip("/"), query and f"?{query}"
        json_alone = dict.fromkeys(("Content-Type", "Accept"), "application/json")
        self._headers = {**json_alone, "Accept-Encoding": "identity"}
        for name, value in {"key": api_key or "", **(headers or {})}.items():
            if fault := key_fault(value):
                raise errors.ConfigError(
                    f"the {name} for {service} contains {fault}. Expected printable ASCII characters only."
                )
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
            if self._query:  # Azure deployments expect the key here
                self._headers["api-key"] = api_key
        self._headers |= headers or {}
        self._sessions: PerLoop[aiohttp.ClientSession] = PerLoop(open_session)

    async def post(
        self, path: str, body: Mapping[str, object], read: Callable[[bytes], T] = bytes,  # type: ignore[assignment]
        *, request_id: str | None = None,
    ) -> T:  # fmt: skip
        """Send `body` as JSON to a path and return `read` of the answer's body. Pass `request_id` if `body` also
        contains it. Raises `ServiceError`, which never quotes the service, for anything but a 200 within the size
        limit, and for a reply to another request, which also closes the connection."""
        try:
            content = json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # checking first would double the time
            content = json.dumps(encodable(body, f"a request to {self.service}"), ensure_ascii=False).encode()
        with CallNote(self.service, path, content) as note:
            note.answer, response = await self._send("POST", path, content, request_id or make_request_id(), body)
            try:
                return read(note.answer)
            except errors.ForeignReply:
                note.answer = None  # another request's
                response.hang_up()
                raise
            except errors.ServiceOverloaded as error:  # reported in the body
                if error.retry_after_s is None:
                    error.retry_after_s = statuses.retry_after_s(response.headers)
                raise

    async def get(self, path: str) -> bytes:
        """The body of the answer. Raises like `post`."""
        return (await self._send("GET", path, None, make_request_id()))[0]

    async def _send(
        self, method: str, path: str, content: bytes | None, request_id: str, fields: Collection[str] = ()
    ) -> tuple[bytes, WiredResponse]:
        headers = {**self._headers, REQUEST_ID_HEADER: request_id}
        try:
            # No redirects: customers' text goes to the configured address only.
            async with self._sessions.get().request(
                method, self._base_url + path + self._query, data=content, headers=headers, allow_redirects=False
            ) as reply:
                response = cast(WiredResponse, reply)
                echoes = response.headers.getall(REQUEST_ID_HEADER, ())
                try:
                    check_echo(self.service, request_id, *echoes)
                except errors.ForeignReply:
                    response.hang_up()
                    raise
                if response.status == 200:
                    return await self._read(response), response
                body = await _read_at_most(response, MAX_ERROR_BODY_BYTES) if response.status in _READ_STATUS else b""
                said = read_error(body or b"", fields)
                raise statuses.status_error(self.service, response.status, response.headers, said)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            # `from None`, here and below: the client's message may contain a header or part of the body
            kind = type(error).__name__
            text = f"{self.service} is unreachable, or disconnected before its answer was complete ({kind})."
            raise errors.ServiceUnavailable(text, code=f"{self.service}_unavailable") from None
        except (aiohttp.ClientError, ValueError) as error:
            text = f"{self.service} did not answer with valid HTTP ({type(error).__name__}): check its address."
            raise errors.ForeignReply(text, code=f"{self.service}_bad_response") from None

    async def aclose(self) -> None:
        """Close the running loop's connections. The next call reopens them."""
        session = self._sessions.pop()
        if session is not None:
            await session.close()

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        is_plain = response.headers.get("Content-Encoding", "identity") == "identity"
        body = await _read_at_most(response, MAX_BODY_BYTES) if is_plain else None
        if body is None:
            fault = f"a body of more than {MAX_BODY_BYTES} bytes" if is_plain else "a compressed body"
            text = f"{self.service} answered with {fault}. Expected a JSON object, see docs/reference/services.md."
            raise errors.BadServiceResponse(text, code=f"{self.service}_bad_response")
        return body


def make_request_id() -> str:
    return f"salesrl-{secrets.token_hex(8)}"


def check_echo(service: str, request_id: str, *echoes: object) -> None:
    """Raise `ForeignReply` if one of `echoes`, in which a service repeats the request's id, is a different id made by
    `make_request_id`. Ids from gateways are ignored."""
    if any(isinstance(echo, str) and echo != request_id and _REQUEST_ID.fullmatch(echo) for echo in echoes):
        text = f"{service} returned the id of another request: it, or a proxy, mixes up replies."
        raise errors.ForeignReply(text, code=f"{service}_foreign_reply")


def read_json(content: bytes) -> object:
    """Parse a body and make it `encodable`. Raises `ValueError` unless it is UTF-8 JSON whose objects have unique
    keys."""
    try:
        value: object = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_object)
        return encodable(value, "the reply of a service") if _SURROGATE.search(content) else value
    except RecursionError:
        raise ValueError("a body nested too deeply") from None


def form_of(content: bytes) -> str:
    """Describe a body that is not JSON, without quoting it."""
    page = "a web page (HTML), e.g. of a login or a gateway: check the address, the key, and any proxy in between"
    return page if content.lstrip().startswith(b"<") else "not JSON in UTF-8 with unique keys"


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("an object with duplicate keys")
    return dict(pairs)


def refuse_stated_error(service: str, answer: object, sent: Collection[str] = ()) -> None:
    """Raise for a 200 whose body reports an error: a non-empty `error` or `errors`, a false `success` or `ok`, a
    `status` in `FAILED_WORDS`, or an HTTP status from 400 up in `status` or `code`. Raises the error for the reported
    status if recognised, otherwise `ErrorInAnswer`. `sent`: the request's fields."""
    if not isinstance(answer, Mapping):
        return
    stated = [name for name in ("error", "errors") if answer.get(name)]
    stated += [name for name in ("success", "ok") if answer.get(name) is False]
    status = answer.get("status")
    stated += ["status"] if isinstance(status, str) and status.lower() in FAILED_WORDS else []
    codes = {name: answer.get(name) for name in ("status", "code")}
    stated += [name for name, code in codes.items() if type(code) is int and 400 <= code < 600]
    if not stated:
        return
    said = read_error(answer, sent)
    known = {*statuses.OVERLOAD_STATUS, *statuses.DENIED_STATUS, 403, *([400] if said.refused else [])}
    if said.status in known or said.marks & statuses.QUOTA_MARKS or (said.status or 0) >= 500:
        raise statuses.status_error(service, said.status or 429, {}, said)
    text = f"{service} answered 200 with a `{stated[0]}` that reports a failure: see its own log."
    raise errors.ErrorInAnswer(text, code=f"{service}_error_in_answer")


def key_fault(key: str) -> str | None:
    """Explain why a key can't be sent in a header, without showing it; `None` if it can."""
    wrong = [(place, each) for place, each in enumerate(key, start=1) if not "!" <= each <= "~"]
    what = "white space or a control character" if wrong and wrong[0][1].isascii() else "a non-ASCII character"
    return f"{what} at position {wrong[0][0]} of {len(key)}" if wrong else None


async def _read_at_most(response: aiohttp.ClientResponse, limit: int) -> bytes | None:
    """The body; `None` if it exceeds `limit` bytes."""
    try:
        await response.content.readexactly(limit + 1)
    except asyncio.IncompleteReadError as whole:
        return whole.partial
    return None
