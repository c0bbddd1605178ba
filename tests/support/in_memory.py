"""Services that are asked without a socket, on the caller's event loop: for tests in virtual time.

Everything of the package is as it is but aiohttp's session, which `tests/faults/test_http_faults.py` has.
"""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial

import aiohttp
from multidict import CIMultiDict

from support import virtual_time
from support.loopback import Answers
from support.loopback import score_batch as _score_batch


@dataclass
class Request:
    """What a service is asked."""

    path: str
    headers: CIMultiDict
    data: bytes

    @cached_property
    def json(self):
        return json.loads(self.data)


@dataclass
class Reply:
    """What it answers: as much of an aiohttp response as `HttpClient` reads."""

    body: bytes
    status: int = 200
    headers: CIMultiDict = field(default_factory=CIMultiDict)

    @property
    def content(self):
        return self

    async def readexactly(self, count):
        if len(self.body) < count:
            raise asyncio.IncompleteReadError(self.body, count)
        return self.body[:count]

    def hang_up(self):
        """There is no connection."""


class Network:
    """Addresses, and the functions that answer there: `async answer(request) -> Reply`. Every client asks here."""

    def __init__(self, monkeypatch):
        self._answers = {}
        monkeypatch.setattr("salesrl_trl.service.http.open_session", lambda: self)

    def serve(self, answer):
        """An address at which `answer` answers."""
        url = f"http://service-{len(self._answers)}.test"
        self._answers[url] = answer
        return url

    async def close(self):
        """As aiohttp's session."""

    @asynccontextmanager
    async def request(self, method, url, *, data, headers, allow_redirects):
        """As aiohttp's session. Nobody listens at an address that is not of this network."""
        base = next((each for each in self._answers if url.startswith(f"{each}/")), None)
        await asyncio.sleep(0)
        if base is None:
            raise aiohttp.ClientConnectionError
        yield await self._answers[base](Request(url[len(base) :], CIMultiDict(headers), data or b""))


def hang_up():
    """The service closes the connection in place of an answer."""
    raise aiohttp.ServerDisconnectedError


class Services(Answers):
    """As those of `support.loopback`, in memory."""

    PAGES = {"/healthz": Reply(b"{}"), "/v1/models": Reply(b'{"data": []}')}  # noqa: RUF012

    def __init__(self, network):
        super().__init__(network.serve(self._respond))

    async def _respond(self, request):
        name = next((name for name, path in self.PATHS.items() if path == request.path), None)
        if name is None:
            return self.PAGES.get(request.path, Reply(b"", 404))
        status, text, headers, delay_s = self.next_answer(name, request)
        await asyncio.sleep(delay_s)
        return Reply(text.encode(), status, CIMultiDict(headers))


score_batch = partial(_score_batch, run=virtual_time.run)
