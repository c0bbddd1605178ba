"""Fault servers in processes of their own, and calls against them."""

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from support.loopback import row

from salesrl_trl.reward.service.http import HttpClient
from salesrl_trl.reward.service.transport import Transport

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
def transport():
    """A transport with the package's defaults, whatever is given aside."""

    def build(**settings):
        defaults = {"max_concurrency": 64, "attempt_timeout_s": 60.0, "max_attempts": 3}
        return Transport("rag_8b", **{**defaults, **settings})

    return build


@pytest.fixture
def call_all():
    """Run `count` calls at once over one transport; returns each one's result or error, in order."""

    def run(url, transport, count, path="/v1/rag/8b"):
        async def all_of_them():
            http = HttpClient("rag_8b", url)
            try:
                return await asyncio.gather(
                    *(transport.call(lambda: http.post(path, {"context": "hi"})) for _ in range(count)),
                    return_exceptions=True,
                )
            finally:
                await http.aclose()

        return asyncio.run(all_of_them())

    return run


@pytest.fixture
def rows():
    return [row(f"r{index}", ("fairness", "hallucination")[index % 2]) for index in range(8)]
