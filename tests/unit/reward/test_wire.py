"""Servers that send more than they are asked for: no reply is taken for another request's."""

import asyncio
import json
import re

import pytest

from salesrl_trl.errors import ForeignReply, ServiceError
from salesrl_trl.service.http import REQUEST_ID_HEADER, HttpClient, check_echo, make_request_id

CALLS = 4


def reply(number, extra=b"", head=""):
    body = json.dumps({"number": number}).encode()
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body + extra


STRAY = reply(-1)


class Server:
    """Answers the request `{"number": 3}` with what `talk(3, id)` says: one write, and a later one when there is a
    second part. Sends `greeting` to each connection."""

    def __init__(self, talk, greeting=b""):
        self.talk, self.greeting = talk, greeting
        self.connections = 0
        self.said = asyncio.Event()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error):
        self.server.close()

    async def serve(self, reader, writer):
        self.connections += 1
        writer.write(self.greeting)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(int(re.search(rb"(?i)content-length: (\d+)", head)[1]))
                request_id = re.search(rb"(?i)x-request-id: (\S+)", head)[1].decode()
                first, *rest = self.talk(json.loads(body)["number"], request_id)
                writer.write(first)
                for part in rest:
                    await asyncio.sleep(0.005)
                    writer.write(part)
                self.said.set()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


def numbers(talk, *, pause_s=0.0, greeting=b"", wait_for_all=True):
    """The answers or errors of `CALLS` calls in a row, and the number of their connections."""

    async def run():
        async with Server(talk, greeting) as server:
            http, got = HttpClient("rag_8b", server.url), []
            for number in range(CALLS):
                server.said.clear()
                try:
                    got.append(json.loads(await http.post("/", {"number": number}))["number"])
                except ServiceError as error:
                    got.append(error)
                if wait_for_all and not greeting:
                    await server.said.wait()
                await asyncio.sleep(pause_s)
            await http.aclose()
            return got, server.connections

    return asyncio.run(asyncio.wait_for(run(), 30.0))


def test_a_server_that_sends_one_reply_each_keeps_its_connection():
    assert numbers(lambda number, _: [reply(number)]) == (list(range(CALLS)), 1)


@pytest.mark.parametrize("pause_s", [0.01, 0.0], ids=["read", "unread"])
@pytest.mark.parametrize(
    "more",
    [
        lambda number: [reply(number, STRAY)],
        lambda number: [reply(number), STRAY],
        lambda number: [reply(number), b"\r\n"],
        lambda number: [reply(number, STRAY[:20])],
        lambda number: [reply(number, STRAY[:20]), STRAY[20:]],
        lambda number: [b"HTTP/1.1 103 Early Hints\r\n\r\n", reply(number), STRAY],
    ],
    ids=["with it", "later", "a line's end", "a part", "in parts", "after hints"],
)
def test_what_comes_after_a_reply_closes_its_connection(more, pause_s):
    """`unread`: the stray lies in the socket, and no event has told the client of it."""
    assert numbers(lambda number, _: more(number), pause_s=pause_s) == (list(range(CALLS)), CALLS)


def test_a_body_that_comes_twice_is_no_answer():
    got, _ = numbers(lambda number, _: [reply(number, json.dumps({"number": number}).encode())])
    assert [(type(each), each.code, each.worth_retrying) for each in got] == [
        (ForeignReply, "rag_8b_bad_response", True)
    ] * CALLS


def test_a_server_that_speaks_before_it_is_asked_answers_nothing():
    got, connections = numbers(lambda number, _: [reply(number)], greeting=STRAY)
    assert all(isinstance(each, ServiceError) for each in got)
    assert connections == CALLS


@pytest.mark.parametrize("status", [200, 503])
def test_a_reply_with_another_requests_id_is_refused_and_its_connection_closed(status):
    def talk(number, request_id):
        head = f"{REQUEST_ID_HEADER}: {make_request_id() if number % 2 else request_id}\r\n"
        return [reply(number, head=head).replace(b"200", str(status).encode() if number % 2 else b"200")]

    got, connections = numbers(talk)
    assert [type(each) for each in got] == [int, ForeignReply] * (CALLS // 2)
    assert {each.code for each in got[1::2]} == {"rag_8b_foreign_reply"}
    assert connections == CALLS // 2


@pytest.mark.parametrize("echo", [None, "", 7, "req_011CQ", "0123456789abcdef", ["salesrl-0123456789abcdef"]])
def test_what_is_no_id_of_ours_is_no_echo(echo):
    """Gateways put ids of their own there."""
    check_echo("rag_8b", make_request_id(), echo)
