"""Fault servers, in separate processes or in memory, and calls to them."""

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from faults.fault_server import Scenarios
from multidict import CIMultiDict
from support import virtual_time
from support.in_memory import Network, Reply, hang_up

from salesrl_trl.service.http import HttpClient
from salesrl_trl.service.transport import Transport

SERVER = Path(__file__).with_name("fault_server.py")


class FaultServer:
    """A running fault server."""

    def __init__(self, settings, server=SERVER):
        self.process = subprocess.Popen(
            [sys.executable, str(server), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(SERVER.parents[1])},
        )
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    @property
    def stats(self):
        with urllib.request.urlopen(f"{self.url}/_stats") as answer:
            return json.load(answer)

    def stop(self):
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()


class FaultInMemory:
    """The scenarios of a fault server, on the caller's event loop."""

    def __init__(self, network, settings):
        self.scenarios = Scenarios(**settings)
        self.url = network.serve(self._answer)
        self.stats = self.scenarios.stats

    async def _answer(self, request):
        wire = _Wire()
        await self.scenarios.serve(request.path, wire, request.data)
        return wire.reply()


class _Wire:
    """A fake of the connection that a scenario writes to."""

    def __init__(self):
        self._written = b""
        self.write = self._add
        self.abort = hang_up

    def _add(self, content):
        self._written += content

    def reply(self):
        head, _, body = self._written.partition(b"\r\n\r\n")
        status, *headers = head.decode().split("\r\n")
        return Reply(body, int(status.split()[1]), CIMultiDict(line.split(": ", 1) for line in headers))


@pytest.fixture
def fault():
    """Start a server: `fault("slots", slots=16, seconds=0.3)`."""
    started = []

    def start(kind, **settings):
        started.append(FaultServer({"kind": kind, **settings}))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def fault_in_memory(monkeypatch):
    """Like `fault`, but without a socket, for calls in virtual time."""
    network = Network(monkeypatch)
    return lambda kind, **settings: FaultInMemory(network, {"kind": kind, **settings})


@pytest.fixture
def transport():
    """A transport with the package's defaults, except for the given settings."""

    def build(**settings):
        defaults = {"max_concurrency": 64, "attempt_timeout_s": 60.0, "max_attempts": 3}
        return Transport("rag_8b", **{**defaults, **settings})

    return build


@pytest.fixture
def call_all():
    """Run `count` concurrent calls over one transport, in virtual time unless another `run` is given. Returns each
    one's result or error, in order, and the total seconds."""

    def call(url, transport, count, run=virtual_time.run):
        async def all_of_them():
            http, loop = HttpClient("rag_8b", url), asyncio.get_running_loop()
            started = loop.time()
            try:
                results = await asyncio.gather(
                    *(transport.call(lambda: http.post("/v1/rag/8b", {"context": "hi"})) for _ in range(count)),
                    return_exceptions=True,
                )
                return results, loop.time() - started
            finally:
                await http.aclose()

        return run(all_of_them())

    return call
