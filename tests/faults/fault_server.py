"""A loopback HTTP server that misbehaves on demand, in a process of its own: a test measures the client alone.

It prints its port as one line and serves until its stdin closes. `GET /_stats` returns how many requests came and how
they ended. `conftest.py` also plays the scenarios in memory, without a server.
"""

import asyncio
import json
import math
import random
import re
import sys

ANSWER = {"answer": "It costs 5980 yuan.", "passages": [{"id": "d1", "text": "...", "score": 0.5}], "took_ms": 1.5}
VERDICT = {"candidate": 0.75, "reference": 0.5, "reason": "fine"}


def chat(content):
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def nonce_of(body):
    """The nonce that a judge has to return. The fence states it first."""
    found = re.search(rb"nonce ([0-9a-f]{16})", body)
    return found and found[1].decode()


def good(path, body):
    if not path.endswith("/chat/completions"):
        return ANSWER
    return chat(json.dumps({"nonce": nonce_of(body), **VERDICT}))


def response(status, body, **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Fault", "Content-Type: application/json", f"Content-Length: {len(content)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + content


def seconds_of(end, median, sigma, body):
    """Seconds that the endpoint whose path ends with `end` takes for the item that the body names."""
    item = re.search(rb"item-\d+", body)
    if not sigma or item is None:
        return median
    return median * math.exp(random.Random(f"{end} {item[0].decode()}").gauss(0.0, sigma))


class Scenarios:
    """A method for each scenario. It writes to the transport itself, so it may write slowly."""

    def __init__(self, **settings):
        self.settings = settings
        self.good = settings.get("good", good)
        self.others = [Scenarios(**other) for other in settings.get("others", ())]
        self.stats = {"requests": 0, "connections": 0, "ok": 0, "refused": 0}
        self.busy = 0
        self.random = random.Random(0)

    async def serve(self, path, transport, body):
        self.stats["requests"] += 1
        self.busy += 1
        try:
            await getattr(self, self.settings["kind"])(path, transport, body)
        finally:
            self.busy -= 1

    def ok(self, path, transport, body):
        self.stats["ok"] += 1
        transport.write(response(200, self.good(path, body)))

    def refuse(self, transport, status, body=None, **headers):
        self.stats["refused"] += 1
        transport.write(response(status, body or {"error": {"message": "no"}}, **headers))

    async def slots(self, path, transport, body):
        """So many requests at once, of `seconds` each. One more is a 429."""
        if self.busy > self.settings["slots"]:
            self.refuse(transport, 429, Retry_After=self.settings.get("retry_after", "1"))
            return
        await asyncio.sleep(self.settings["seconds"])
        self.ok(path, transport, body)

    async def hang_up(self, path, transport, body):
        """The port is open, but every connection is closed without an answer."""
        self.stats["refused"] += 1
        transport.abort()

    async def status(self, path, transport, body):
        """Refuses every request, or those after the first `after`."""
        if self.stats["ok"] < self.settings.get("after", 0):
            return self.ok(path, transport, body)
        self.refuse(transport, self.settings["status"], self.settings.get("body"), **self.settings.get("headers", {}))

    async def some(self, path, transport, body):
        """A share of the requests, at random, meets one of the scenarios `others`. In memory alone, `good` makes the
        answer of the rest: `good(path, body)`."""
        if self.random.random() < self.settings["share"]:
            await self.random.choice(self.others).serve(path, transport, body)
        else:
            self.ok(path, transport, body)

    async def body(self, path, transport, body):
        """A 200 with the given body."""
        transport.write(response(200, self.settings["body"].encode(), **self.settings.get("headers", {})))

    async def stragglers(self, path, transport, body):
        """Every n-th request takes very long."""
        late = self.stats["requests"] % self.settings["every"] == 0
        low, high = self.settings["seconds"]
        await asyncio.sleep(self.settings["late_seconds"] if late else self.random.uniform(low, high))
        self.ok(path, transport, body)

    async def drip(self, path, transport, body):
        """A byte at a time."""
        content = json.dumps(good(path, body)).encode()
        transport.write(response(200, content)[: -len(content)])
        for byte in content:
            transport.write(bytes([byte]))
            await asyncio.sleep(self.settings["seconds"])

    async def huge(self, path, transport, body):
        """As many bytes as the settings say, with a length or in chunks."""
        head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
        chunked = self.settings.get("chunked", False)
        head += "Transfer-Encoding: chunked" if chunked else f"Content-Length: {self.settings['bytes']}"
        transport.write(head.encode() + b"\r\n\r\n")
        part = b" " * 65536
        for _ in range(self.settings["bytes"] // len(part)):
            if transport.is_closing():
                return
            transport.write(b"10000\r\n" + part + b"\r\n" if chunked else part)
            self.stats["ok"] += len(part)
            while transport.get_write_buffer_size() > 1_000_000 and not transport.is_closing():
                await asyncio.sleep(0.001)

    async def redirect(self, path, transport, body):
        """Each request gets the next status."""
        status = self.settings["statuses"][self.stats["requests"] - 1]
        self.refuse(transport, status, Location=self.settings["location"])

    async def overloaded_once(self, path, transport, body):
        """The first request is turned away."""
        if self.stats["requests"] > 1:
            self.ok(path, transport, body)
            return
        self.refuse(transport, self.settings.get("status", 429), **self.settings["headers"])

    async def down(self, path, transport, body):
        """500 for the first `failures` requests, each after `seconds`. Then the service is well."""
        await asyncio.sleep(self.settings.get("seconds", 0))
        if self.stats["requests"] <= self.settings["failures"]:
            self.refuse(transport, 500)
        else:
            self.ok(path, transport, body)

    async def chaos(self, path, transport, body):
        """Errors, broken connections, refusals, stragglers, and answers that no client can read."""
        kind = self.random.random()
        await asyncio.sleep(0.3 if kind > 0.96 else self.random.uniform(0.001, 0.01))
        if kind < 0.1:
            self.refuse(transport, 500)
        elif kind < 0.15:
            self.refuse(transport, 429, Retry_After="0.05")
        elif kind < 0.2:
            await self.hang_up(path, transport, body)
        elif kind < 0.25:
            transport.write(response(200, b"{"))
        else:
            self.ok(path, transport, body)

    async def latency(self, path, transport, body):
        """The end of the path decides the seconds. With `sigma` they are the median of a log-normal draw, which is the
        same for the same item (`item-123` in the body)."""
        end, median = next(each for each in self.settings["seconds"].items() if path.endswith(each[0]))
        await asyncio.sleep(seconds_of(end, median, self.settings.get("sigma", 0.0), body))
        self.ok(path, transport, body)


class Connection(asyncio.Protocol):
    """Just enough of HTTP/1.1: keep-alive, a body with a length, one request at a time."""

    def __init__(self, scenarios):
        self.scenarios = scenarios
        self.buffer = b""

    def connection_made(self, transport):
        self.transport = transport
        self.scenarios.stats["connections"] += 1

    def data_received(self, data):
        self.buffer += data
        head, blank, rest = self.buffer.partition(b"\r\n\r\n")
        lowered = head.lower()
        _, _, length = lowered.partition(b"content-length:")
        size = int(length.split(b"\r\n", 1)[0]) if length else 0
        if not blank or len(rest) < size:
            return
        self.buffer, body = rest[size:], rest[:size]
        path = head.split(b" ", 2)[1].decode()
        if path == "/_stats":
            self.transport.write(response(200, self.scenarios.stats))
        else:
            self.task = asyncio.ensure_future(self.scenarios.serve(path, self.transport, body))

    def connection_lost(self, error):
        task = getattr(self, "task", None)
        if task is not None:
            task.cancel()


async def serve(scenarios):
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(scenarios), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(Scenarios(**json.loads(sys.argv[1]))))
