"""Connections whose replies belong to the requests that they carried.

aiohttp reuses a kept-alive connection that holds unread bytes, so that a stray reply would answer the next request.
Here a connection is used again only if it brought exactly one reply to its last request and nothing since. A stray
reply that arrives after the next request was sent can't be recognised by its bytes: therefore every request carries an
id, and each judge's request a nonce.
"""

import select
from functools import partial
from typing import Any, cast

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http import RawResponseMessage
from aiohttp.streams import StreamReader

KEEPALIVE_S = 60.0  # how long an idle connection is kept: longer than an optimizer step


def open_session() -> aiohttp.ClientSession:
    """A session on the running loop, without proxies, cookies or limits of its own."""
    return aiohttp.ClientSession(
        connector=_Connector(limit=0, keepalive_timeout=KEEPALIVE_S),  # 0: the transport limits
        response_class=WiredResponse,
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,  # no proxy from the environment: customers' text goes to the configured address only
    )


class WiredResponse(aiohttp.ClientResponse):
    """A response that can close its connection after the connection was given back."""

    _wire: ResponseHandler | None = None

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        self._wire = connection.protocol
        return await super().start(connection)

    def hang_up(self) -> None:
        """Close the connection: it brought the reply to another request, and its next reply would be wrong too."""
        if self._wire is not None:
            self._wire.abort()


class _Wire(ResponseHandler):
    """One connection. Unlike aiohttp's, it closes at the first byte beyond the reply to its latest request."""

    was_used = False
    _reply: StreamReader | None = None  # the reply to the latest request, once its head has come
    _holds_more = False

    def set_response_params(self, **settings: Any) -> None:
        self.was_used, self._reply = True, None
        super().set_response_params(**settings)

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        if self._reply is not None:
            self._holds_more = True  # this is a second reply: it is ignored
            return
        if data[0].code >= 200:  # a 1xx comes before the reply
            self._reply = data[1]
        super().feed_data(data, size)

    def data_received(self, data: bytes) -> None:
        if data and not self._is_waiting:
            self.abort()
            return
        super().data_received(data)
        if not self._is_waiting and (self._holds_more or self._began_another()):
            self.abort()  # the reply itself stays readable

    @property
    def is_fresh(self) -> bool:
        """Whether no byte has come that a request sent now could take for its reply."""
        if self.transport is None or self.should_close:
            return False
        if not self.was_used and self.transport.get_extra_info("sslcontext"):
            return True  # TLS itself sends tickets at first
        unread = select.poll()
        unread.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not unread.poll(0)

    @property
    def _is_waiting(self) -> bool:
        """Whether a request is out whose reply has not ended."""
        return self.was_used and (self._reply is None or not self._reply.is_eof())

    def _began_another(self) -> bool:
        """Whether the parser holds the beginning of another reply. Each request has its own parser."""
        try:
            return self._parser is not None and self._parser.feed_eof() is not None
        except Exception:  # any error of the parser means that there is such a beginning
            return True


class _Connector(aiohttp.TCPConnector):
    """Hands out fresh connections only."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._factory = cast("partial[ResponseHandler]", partial(_Wire, loop=self._loop))

    async def connect(self, *args: Any, **settings: Any) -> Connection:
        """A connection without unread bytes. One with unread bytes is closed, and another one is taken."""
        while True:
            connection = await super().connect(*args, **settings)
            wire = cast(_Wire, connection.protocol)
            if wire.is_fresh:
                return connection
            connection.close()
            if not wire.was_used:
                raise aiohttp.ClientConnectionError("the service spoke before it was asked")
