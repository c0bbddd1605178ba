"""Whatever an agent sends to the endpoint is that request's failure: never the run's, and never another episode's."""

import http.client
import json
import resource
import socket
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.agents import ASKED, LOOK, Policy, chat_tokenizer

from salesrl_trl.agents import policy_endpoint
from salesrl_trl.agents.policy_endpoint import PolicyEndpoint

PATH = "/v1/chat/completions"
CALLS = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
HALF = "half \ud83d"


class Agent:
    """Sends bytes to an endpoint with the key of an episode."""

    def __init__(self, endpoint, key):
        self.host, port = endpoint.address.removeprefix("http://").removesuffix("/v1").split(":")
        self.port, self.key = int(port), key

    def ask(self, body, path=PATH, method="POST", **headers):
        if not isinstance(body, bytes | None):
            body = json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=20)
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"} | headers
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def connect(self, sent=b""):
        opened = socket.create_connection((self.host, self.port), timeout=20)
        opened.sendall(sent)
        return opened

    def raw(self, sent):
        """What comes back until the endpoint closes the connection, or a second long."""
        with self.connect(sent) as opened:
            opened.settimeout(1.0)
            got = b""
            try:
                while piece := opened.recv(65536):
                    got += piece
            except (TimeoutError, ConnectionResetError):
                pass
            return got

    def head(self, more=""):
        return f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.key}\r\n{more}".encode()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("hostile") / "policy")


@pytest.fixture(scope="module")
def endpoint():
    endpoint = PolicyEndpoint()
    yield endpoint
    endpoint.close()


@pytest.fixture
def agent(endpoint, tokenizer):
    policy = Policy(tokenizer, iter(lambda: "Yes.", None))
    with endpoint.open(policy.calls) as key:
        yield Agent(endpoint, key)
    assert policy.calls.error is None  # the run goes on


def asking(**fields):
    return {"messages": ASKED, **fields}


def said(**message):
    return {"messages": [*ASKED, {"role": "assistant", "content": "", **message}, {"role": "user", "content": "On."}]}


DEEP = b"[" * 100_000 + b"]" * 100_000
REFUSED = {
    "deep": DEEP,
    "deep in a field": b'{"messages": [{"role": "user", "content": "x"}], "user": ' + DEEP[99_700:-99_700] + b"}",
    "no UTF-8": b'{"messages": "\xff\xfe"}',
    "empty": b"",
    "a huge number": b'{"n": ' + b"9" * 5000 + b"}",
    "no role": asking(messages=[{"content": "x"}]),
    "a tool without a name": asking(tools=[{"type": "function", "function": {}}]),
    "max_tokens: a text": asking(max_tokens="5"),
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
def test_an_odd_body_is_a_400_in_words(agent, body):
    status, answer = agent.ask(body)
    assert (status, json.loads(answer)["error"]["code"]) == (400, "invalid_request")
    assert agent.ask(asking())[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        asking(messages=[{"role": "user", "content": HALF}]),
        asking(tools=[{"type": "function", "function": {"name": "look", "description": HALF, "parameters": None}}]),
        asking(tools=None, stream=None, stream_options=None, n=None, max_tokens=10**30, temperature=None, user="x"),
        said(tool_calls=[{**CALLS[0], "function": {"name": "look", "arguments": "[" * 400 + "]" * 400}}]),
        said(tool_calls=[{**CALLS[0], "function": {"name": "look", "arguments": '{"word": "\\ud83d"}'}}]),
        b'{"n": 5, "n": 1, "messages": [{"role": "user", "role": "user", "content": "x"}]}',
        json.dumps(asking(**{f"field {place}": 1 for place in range(2000)})).encode(),
    ],
    ids=["half a pair", "in a tool", "null", "deep arguments", "in arguments", "keys twice", "many"],
)  # fmt: skip
def test_a_request_that_can_be_answered_is(agent, body, caplog):
    assert agent.ask(body)[0] == 200
    assert len(caplog.records) < 5


def test_what_is_not_a_request_is_refused_and_the_next_one_is_answered(agent):
    body = json.dumps(asking()).encode()
    assert agent.ask(asking(), **{"Content-Type": "application/json; charset=nosuch"})[0] == 400
    assert agent.ask(b"\x1f\x8b broken", **{"Content-Encoding": "gzip"})[0] == 400
    assert agent.ask(b" " * (policy_endpoint.MAX_BODY_BYTES + 1))[0] == 413
    assert agent.ask(asking(), **{"X": "x" * 100_000})[0] == 400
    assert agent.ask(None, method="DELETE")[0] == 405
    assert agent.ask(asking(), path="/v1/../etc/passwd")[0] == 404
    chunked = agent.head("Transfer-Encoding: chunked\r\n\r\n")
    assert b" 400 " in agent.raw(chunked + b"zz\r\nx\r\n")
    assert b" 400 " in agent.raw(agent.head("Content-Length: 5\r\n\r\n") + body)  # less than there is
    assert b" 400 " in agent.raw(agent.head("Content-Length: -5\r\n\r\n") + body)
    assert b" 400 " in agent.raw(b"\x16\x03\x01\x00\x00\r\n\r\n")  # TLS
    one = agent.head(f"Content-Length: {len(body)}\r\n\r\n") + body
    assert agent.raw(one * 2).count(b"HTTP/1.1 200") == 2  # one behind the other
    assert agent.ask(asking())[0] == 200


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", HALF, "user", "tool"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["role", "content", "tool_calls", "function", "name", "arguments", "type", "text", "tool_call_id", "id", HALF,
         "parameters", "properties", "include_usage"]), inner, max_size=5),
    max_leaves=12,
)  # fmt: skip
FIELDS = sorted({*policy_endpoint._READ, *policy_endpoint._REFUSED, "anything"})


@given(
    body=st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=5)
    | st.builds(lambda odd: asking(tools=[{**LOOK, "function": {**LOOK["function"], "parameters": odd}}]), ODD)
    | st.builds(lambda odd: said(tool_calls=odd), ODD)
    | st.builds(lambda odd: {"messages": [*ASKED, odd]}, ODD)
    | st.binary(max_size=40)
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_body_is_answered_or_refused(agent, body):
    status, answer = agent.ask(body)
    assert status in (200, 400), answer


def still_open(connection):
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def test_connections_are_bounded_and_those_of_requests_outlive_idle_ones(agent, monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, limits[1]))
    opened = []
    for _ in range(12):
        opened += [agent.connect(agent.head()[:40]) for _ in range(5)]
        assert agent.ask(asking())[0] == 200
    ends = time.monotonic() + 10.0
    while sum(is_open := [*map(still_open, opened)]) > 25 and time.monotonic() < ends:
        time.sleep(0.02)
    for each in opened:
        each.close()
    assert sum(is_open) <= 25  # half of the files, and those that were accepted together with the last one
    assert not any(is_open[:20])  # the oldest were closed


def test_a_connection_without_a_request_is_closed_and_one_without_a_body_refused(monkeypatch, tokenizer):
    monkeypatch.setattr(policy_endpoint, "HEAD_S", 0.3)
    monkeypatch.setattr(policy_endpoint, "BODY_S", 0.3)
    endpoint, policy = PolicyEndpoint(), Policy(tokenizer, ["Yes."])
    with endpoint.open(policy.calls) as key:
        agent = Agent(endpoint, key)
        assert agent.raw(agent.head()[:40]) == b""  # closed: the second of `raw` isn't over
        assert agent.raw(b"") == b""
        assert agent.raw(agent.head("Content-Length: 100\r\n\r\n") + b"{").startswith(b"HTTP/1.1 400")
    endpoint.close()
    assert policy.calls.error is None


def test_the_endpoint_closes_within_seconds_whatever_is_open(tokenizer):
    endpoint, policy = PolicyEndpoint(), Policy(tokenizer, [])
    policy.calls._ask = lambda ids: time.sleep(60)
    with endpoint.open(policy.calls) as key:
        agent, body = Agent(endpoint, key), json.dumps(asking()).encode()
        one = agent.head(f"Content-Length: {len(body)}\r\n\r\n") + body
        opened = [agent.connect(sent) for sent in (b"", agent.head(), one, one * 20, one[:-5])]
        time.sleep(0.2)
    began = time.monotonic()
    endpoint.close()
    assert time.monotonic() - began < 5
    for each in opened:
        each.close()
