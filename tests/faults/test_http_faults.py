"""Answers that are slow, huge, elsewhere or no answers at all: over real HTTP, unless only the transport waits."""

import asyncio
import socket
import time
import tracemalloc
from email.utils import formatdate

import pytest
from support import virtual_time
from support.seconds import check_seconds

from salesrl_trl.errors import BadServiceResponse, ServiceError, ServiceOverloaded, ServiceTimeout
from salesrl_trl.judged.rag_client import RagClient
from salesrl_trl.service.event_loop import deadline, now
from salesrl_trl.service.http import HttpClient
from salesrl_trl.service.statuses import retry_after_s
from salesrl_trl.types import Action, RequestIds


@pytest.fixture
def ask(transport):
    """One 8B call. Returns the answer or the error, and the seconds it took."""

    def call(url, within_s=60.0, run=asyncio.run, **limits):
        async def once():
            rag = RagClient(url, transport_8b=transport(**limits), transport_32b=transport(**limits), api_key="key-1")
            started = now()
            try:
                with deadline(within_s):
                    action = Action(fields={"rewritten_query": "price"})
                    result = await rag.chat_8b("hi", action, 0.0, 3, ids=RequestIds())
            except ServiceError as error:
                result = error
            seconds = now() - started
            await rag.aclose()
            return result, seconds

        return run(once())

    return call


@pytest.mark.alone
@pytest.mark.parametrize(
    ("within_s", "attempt_timeout_s", "code"),
    [(60.0, 0.5, "rag_8b_timeout"), (0.5, 60.0, "deadline")],
    ids=["attempt", "deadline"],
)
def test_a_dripping_body_is_cut_off_in_time(fault, ask, within_s, attempt_timeout_s, code):
    server = fault("drip", seconds=0.1)
    error, seconds = ask(server.url, within_s=within_s, attempt_timeout_s=attempt_timeout_s, max_attempts=1)
    print(f"body dripped, limit 0.5 s: {type(error).__name__} after {seconds:.3f} s")
    assert isinstance(error, ServiceTimeout)
    assert error.code == code
    check_seconds(seconds, least=0.5, most=0.6)


@pytest.mark.parametrize("chunked", [False, True], ids=["with a length", "in chunks"])
def test_a_body_of_256_mb_costs_little_memory(fault, ask, chunked):
    server = fault("huge", bytes=256 * 1024 * 1024, chunked=chunked)
    tracemalloc.start()
    try:
        error, _ = ask(server.url)
        megabytes = tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()
    print(f"256 MB body: {megabytes:.1f} MB more at the peak")
    assert error.code == "rag_8b_bad_response"
    assert megabytes <= 32.0  # whole it is 256


def test_a_redirect_to_another_host_is_sent_nothing(fault, ask):
    statuses = [301, 302, 303, 307, 308]
    with socket.create_server(("127.0.0.2", 0)) as elsewhere:
        elsewhere.setblocking(False)
        target = f"http://127.0.0.2:{elsewhere.getsockname()[1]}/v1/rag/8b"
        server = fault("redirect", statuses=statuses, location=target)
        errors = [ask(server.url)[0] for _ in statuses]
        with pytest.raises(BlockingIOError):
            elsewhere.accept()  # nobody so much as connected
    assert [error.code for error in errors] == [f"rag_8b_http_{status}" for status in statuses]
    assert server.stats["requests"] == len(statuses)


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_honoured(fault_in_memory, ask, status):
    server = fault_in_memory("overloaded_once", status=status, headers={"Retry_After": "0.6"})
    answer, seconds = ask(server.url, within_s=10.0, run=virtual_time.run)
    assert answer.text == "It costs 5980 yuan."
    assert server.stats["requests"] == 2
    assert 0.6 <= seconds <= 0.8


def test_a_retry_after_beyond_the_deadline_is_not_waited_for(fault_in_memory, ask):
    server = fault_in_memory("overloaded_once", headers={"Retry_After": "30"})
    error, seconds = ask(server.url, within_s=20.0, run=virtual_time.run)
    assert isinstance(error, ServiceOverloaded)
    assert error.code == "rag_8b_http_429"
    assert seconds == 0.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1.5", 1.5),
        ("1500ms", 1.5),
        ("2s", 2.0),
        ("Wed, 21 Oct 2015 07:28:10 GMT", 10.0),
        ("Wed, 21 Oct 2015 07:28:10 -0000", 10.0),
        ("Wed, 21 Oct 2015 07:27:00 GMT", 0.0),
        ("-3", None),
        ("nan", None),
        ("Sun, 06 Nov 99999999999999999999 08:49:37 GMT", None),
        ("Sun, 06 Nov 1994 08:49:37 +99999999999999999", None),
        ("", None),
    ],
)
def test_retry_after_is_read_in_every_form(text, seconds):
    assert retry_after_s({"retry-after": text, "date": "Wed, 21 Oct 2015 07:28:00 GMT"}) == seconds


def test_milliseconds_have_a_header_of_their_own_and_an_answer_without_a_date_has_ours():
    assert retry_after_s({"retry-after": "1", "retry-after-ms": "500"}) == 0.5
    assert retry_after_s({"retry-after": formatdate(time.time() + 100, usegmt=True)}) == pytest.approx(100, abs=2)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ("{}", {}),
        ("<html>gateway</html>", {"Content_Type": "text/html"}),
        ('{"answer": "x", "passages": [], "took_ms": 1e999}', {}),
        ('{"answer": "x", "passages": [{"id": "a", "text": "", "score": 37.5}], "took_ms": 1}', {}),
        ('{"answer": "x", "passages": [{"id": "a", "text": "", "score": "0.5"}], "took_ms": 1}', {}),
        ("\x1f\x8b", {"Content_Encoding": "gzip"}),
    ],
    ids=["object", "html", "infinite", "raw score", "score as text", "compressed"],
)
def test_a_200_that_is_no_answer_is_typed(fault_in_memory, ask, body, headers):
    server = fault_in_memory("body", body=body, headers=headers)
    error, _ = ask(server.url, run=virtual_time.run)
    assert isinstance(error, BadServiceResponse)
    assert error.code == "rag_8b_bad_response"
    assert server.stats["requests"] == 1  # the same request would get the same answer


@pytest.mark.parametrize("noise", [b"", b"\x00\x01\x02\r\n\r\n", b"HTTP/1.1 OK\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n"])
def test_a_port_that_speaks_no_http_is_typed(ask, noise):
    async def serve(reader, writer):
        await reader.read(100)
        writer.write(noise)
        writer.close()

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        http = HttpClient("rag_8b", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            await http.post("/", {})
        except ServiceError as error:
            return error.code
        finally:
            await http.aclose()
            server.close()

    assert asyncio.run(run()) in ("rag_8b_unavailable", "rag_8b_bad_response")
