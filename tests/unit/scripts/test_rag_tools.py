"""The tool that users run against their own RAG service, mostly as they run it: alone, without any package.

The services are real ones on loopback: the embedded one where all is well, and servers with one fault each.
"""

import ast
import json
import runpy
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.forked import COLD_PYTHON
from support.seconds import check_seconds

from salesrl_trl.demo.services.launcher import EmbeddedServices
from salesrl_trl.errors import ErrorInAnswer, ServiceUnavailable
from salesrl_trl.service.http import FAILED_WORDS, make_request_id, refuse_stated_error

SCRIPTS = Path(__file__).parents[3] / "scripts"
ENDPOINTS = SCRIPTS / "test_rag_endpoints.py"
KEY = "sk-test-7d2f81c0"
GOOD = {"answer": "It costs 5980 yuan.", "passages": [{"id": "d1", "text": "...", "score": 0.5}], "took_ms": 1.5}
TOOL = runpy.run_path(str(ENDPOINTS))


def run(script, *arguments, trusting=None, timeout_s=30, **variables):
    """A tool in an interpreter that sees the standard library alone (-I -S), with only these variables set."""
    trusted = {} if trusting is None else {"SSL_CERT_FILE": str(trusting)}
    return subprocess.run(
        [COLD_PYTHON, "-I", "-S", str(script), *arguments],
        env={"KEY_VARIABLE": KEY, **trusted, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def examine(url, *arguments, endpoint="8b", **options):
    """Exit code and report of a short look at one endpoint."""
    short = ("--requests", "6", "--concurrency", "2")
    result = run(ENDPOINTS, "--base-url", url, "--json", "--only", endpoint, *short, *arguments, **options)
    assert result.stderr == ""
    return result.returncode, json.loads(result.stdout)


def stages_of(report):
    return {stage["name"]: stage["state"] for stage in report["stages"]}


class _Server(ThreadingHTTPServer):
    """Answers POST as `reply` says, by status, headers and body, and anything else with 404. A body that is neither
    bytes nor a function that writes it is sent as JSON."""

    def __init__(self, reply, protocol):
        self.reply = reply
        self.asked = []
        self.lock = threading.Lock()
        handler = type("_Handler", (_Handler,), {"protocol_version": protocol})
        super().__init__(("127.0.0.1", 0), handler)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that has seen enough hangs up
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self):
        self._answer(404, {}, b"")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            number = len(self.server.asked)
            self.server.asked.append((self.path, dict(self.headers), body))
        self._answer(*self.server.reply(number))

    def _answer(self, status, headers, body):
        if callable(body):
            body(self.wfile)
            return
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture(name="serve")
def fixture_serve():
    """Starts a server: `serve(status, headers, body)`, or `serve(function of the request's number)`."""
    with ExitStack() as stack:

        def serve(reply=200, headers=None, body=b"", *, tls=None, protocol="HTTP/1.1"):
            function = reply if callable(reply) else lambda number: (reply, headers or {}, body)
            server = stack.enter_context(_Server(function, protocol))
            if tls is not None:
                server.socket = tls.wrap_socket(server.socket, server_side=True)
            threading.Thread(target=server.serve_forever, args=(0.02,)).start()
            stack.callback(server.shutdown)
            return server

        yield serve


@pytest.fixture(name="service_url", scope="module")
def fixture_service_url():
    with EmbeddedServices() as addresses:
        yield addresses.rag_base_url


# It stands alone.


def test_the_tool_needs_nothing_but_the_standard_library_of_python_39():
    tree = ast.parse(ENDPOINTS.read_text(encoding="utf-8"), feature_version=(3, 9))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names


# A good service.


def test_a_good_service_is_ready_with_figures_and_settings(service_url):
    result = run(ENDPOINTS, "--base-url", service_url, "--json", "--requests", "12", "--concurrency", "4")
    report = json.loads(result.stdout)
    assert (result.returncode, result.stderr) == (0, "")
    assert stages_of(report) == {"DNS": "ok", "TCP": "ok", "TLS": "ok", "HTTP": "ok"}
    assert set(report["endpoints"]) == {"8b", "32b"}
    for each in report["endpoints"].values():
        assert (each["contract"]["state"], each["contract"]["faults"]) == ("ok", [])
        assert each["contract"]["answer"] is None  # nothing of an answer without --show-answers
        latency = each["latency"]
        assert latency["outcomes"] == {"200": 12}
        assert 1 <= latency["connections"] <= 4  # kept alive: at most one for each of 4 at once
        assert 0 < latency["took_ms"]["p50"] <= latency["wall_ms"]["p50"] <= latency["wall_ms"]["max"]
    # All of 4 at once were answered; three times a p99 of milliseconds is below the least timeout of 5 s.
    verdict = report["verdict"]
    assert (verdict["ready"], verdict["rag_max_concurrency"], verdict["rag_timeout_s"]) == (True, 4, 5)


def test_questions_alternate_between_english_and_chinese_in_the_contracts_fields(serve):
    server = serve(200, {}, GOOD)
    examine(server.url, "--concurrency", "1", "--top-k", "5", "--score-threshold", "0.2")
    path, headers, body = server.asked[0]
    assert (path, headers["Content-Type"]) == ("/v1/rag/8b", "application/json")
    fields = "tenant_id contact_id account_id message_id context user_profile rewritten_query history_summary"
    asked = json.loads(body)
    assert set(asked) == {*fields.split(), "score_threshold", "top_k", "request_id"}
    assert asked["request_id"] == headers["X-Request-Id"]
    assert len({json.loads(body)["request_id"] for _, _, body in server.asked}) == len(server.asked)
    assert (asked["score_threshold"], asked["top_k"]) == (0.2, 5)
    latency_run = [json.loads(body)["rewritten_query"].isascii() for _, _, body in server.asked[1:]]
    assert latency_run == [True, False, True, False, True, False]
    server.asked.clear()
    examine(server.url, endpoint="32b")
    assert {frozenset(json.loads(body)) for _, _, body in server.asked} == {
        frozenset({"context", "score_threshold", "top_k", "request_id"})
    }


@pytest.mark.parametrize(
    ("in_header", "in_body", "returned", "said"),
    [
        ("own", "own", ["header", "body"], "id        returned in the header and body"),
        ("own", None, ["header"], "id        returned in the header"),
        ("a gateway's", 7, [], "id        not returned (optional)"),
        ("own", "salesrl-0123456789abcdef", [], "the body returns the id of another request"),
        ("salesrl-0123456789abcdef", None, [], "the header returns the id of another request"),
    ],
    ids=str,
)
def test_whether_a_service_returns_the_requests_id_is_told(serve, in_header, in_body, returned, said):
    def reply(number):
        own = json.loads(server.asked[number][2])["request_id"]
        header, body = (own if each == "own" else each for each in (in_header, in_body))
        return 200, {"X-Request-Id": header}, {**GOOD, "request_id": body}

    server = serve(reply)
    arguments = ("--base-url", server.url, "--only", "8b", "--requests", "2", "--concurrency", "1")
    result = run(ENDPOINTS, *arguments)
    assert said in result.stdout
    assert result.returncode == ("another request" in said)
    told = json.loads(run(ENDPOINTS, *arguments, "--json").stdout)
    assert told["endpoints"]["8b"]["contract"]["id_returned"] == returned


def test_the_tool_and_training_hear_the_same():
    assert TOOL["FAILED_WORDS"] == FAILED_WORDS
    assert TOOL["REQUEST_ID"].fullmatch(make_request_id())
    assert make_request_id().startswith(TOOL["make_request_id"]()[:8])
    for stated in (
        {"error": 1},
        {"errors": [1]},
        {"success": False},
        {"ok": False},
        {"status": "busy"},
        {"code": 503},
    ):
        assert TOOL["failure_faults"](stated)
        with pytest.raises((ErrorInAnswer, ServiceUnavailable)):
            refuse_stated_error("rag_8b", stated)


# Connections that fail.


def test_an_unknown_host_fails_at_dns_and_nothing_after_it_is_tried():
    code, report = examine("http://no-such-host.invalid", "--timeout", "3")
    assert code == 1
    assert stages_of(report) == {"DNS": "failed", "TCP": "not tried", "TLS": "not tried", "HTTP": "not tried"}
    assert "no-such-host.invalid" in report["stages"][0]["got"]
    assert "getent hosts" in report["stages"][0]["advice"]
    endpoint = report["endpoints"]["8b"]
    assert (endpoint["contract"]["state"], endpoint["latency"]["state"]) == ("not tried", "not tried")
    assert report["verdict"]["rag_timeout_s"] is None


def test_a_port_where_nothing_listens_fails_at_tcp():
    with socket.socket() as reserved:  # bound but not listening: nobody else gets the port
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        code, report = examine(f"http://127.0.0.1:{port}", HTTPS_PROXY=f"http://user:{KEY}@proxy.invalid")
    assert (code, stages_of(report)["TCP"], stages_of(report)["TLS"]) == (1, "failed", "not tried")
    tcp = report["stages"][1]
    assert tcp["got"] == f"127.0.0.1 port {port}: refused"
    assert tcp["advice"].startswith("Refused: nothing listens on that port")
    assert tcp["advice"].endswith("HTTPS_PROXY set here: training needs a way without a proxy.")


def test_a_silent_port_is_given_up_after_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code, report = examine(f"http://127.0.0.1:{silent.getsockname()[1]}", "--timeout", "0.3")
    assert (code, report["stages"][3]["got"]) == (1, "GET /healthz: timeout after 0.3 s")


# Certificates.


CA_CONFIG = """
[ca]
default_ca = own
[own]
database = index.txt
new_certs_dir = .
rand_serial = yes
default_md = sha256
policy = names
x509_extensions = extensions
unique_subject = no
[names]
commonName = supplied
[extensions]
subjectAltName = {names}
basicConstraints = CA:TRUE
"""


@pytest.fixture(name="certify")
def fixture_certify(tmp_path):
    """Makes a self-signed certificate: `certify("name", names="DNS:localhost", ends="20200201000000Z")`."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command to make certificates")

    def call(*arguments):
        subprocess.run([openssl, *arguments], cwd=tmp_path, capture_output=True, check=True)

    def certify(name, names="IP:127.0.0.1", ends="20990101000000Z"):
        (tmp_path / "index.txt").touch()
        (tmp_path / "ca.cnf").write_text(CA_CONFIG.format(names=names), encoding="utf-8")
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        call("req", "-new", *curve, "-keyout", "key.pem", "-out", "request.pem", "-subj", f"/CN={name}")
        dates = ("-startdate", "20200101000000Z", "-enddate", ends)
        files = ("-in", "request.pem", "-keyfile", "key.pem", "-out", f"{name}.pem")
        call("ca", "-selfsign", "-batch", "-notext", "-config", "ca.cnf", *dates, *files)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(tmp_path / f"{name}.pem", tmp_path / "key.pem")
        return tmp_path / f"{name}.pem", tls

    return certify


def https(server):
    return server.url.replace("http:", "https:")


def test_a_certificate_of_the_systems_store_is_accepted_and_shown(serve, certify):
    path, tls = certify("rag-test")
    url = https(serve(200, {}, GOOD, tls=tls))
    code, report = examine(url, trusting=path)
    assert code == 0
    got = report["stages"][2]["got"]
    assert got.startswith("TLSv1.3, certificate of commonName=rag-test, for 127.0.0.1, issued by commonName=rag-test")
    assert "expires 2099-01-01 (" in got


def test_a_self_signed_certificate_is_refused_and_gets_no_request(serve, certify):
    _, tls = certify("self-made")
    server = serve(200, {}, GOOD, tls=tls)
    code, report = examine(https(server))
    assert (code, stages_of(report)["TLS"], stages_of(report)["HTTP"]) == (1, "failed", "not tried")
    tls = report["stages"][2]
    assert tls["got"].startswith(
        "a certificate that is refused: it is self-signed. certificate of commonName=self-made"
    )
    assert "name its file in SSL_CERT_FILE, for training too" in tls["advice"]
    assert server.asked == []


@pytest.mark.parametrize(
    ("changes", "fault", "shown"),
    [
        ({"ends": "20200201000000Z"}, "it has expired", "expires 2020-02-01 (-"),
        ({"names": "DNS:other.example"}, "it is for another address", "for other.example"),
    ],
    ids=["expired", "other-host"],
)
def test_a_certificate_that_does_not_fit_is_named_with_what_it_is(serve, certify, changes, fault, shown):
    path, tls = certify("misfit", **changes)
    server = serve(200, {}, GOOD, tls=tls)
    code, report = examine(https(server), trusting=path)
    assert (code, server.asked) == (1, [])
    assert fault in report["stages"][2]["got"]
    assert shown in report["stages"][2]["got"]


# Answers that are none.


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (400, "it must take the fields"),
        (401, "no key was sent: name its --key-env"),
        (404, "--base-url must be the address before /v1/rag"),
    ],
)
def test_a_refusal_is_explained_and_not_repeated(serve, status, said):
    server = serve(status, {}, {"detail": "no"})
    code, report = examine(server.url)
    endpoint = report["endpoints"]["8b"]
    assert (code, endpoint["contract"]["outcome"], len(server.asked)) == (1, str(status), 1)
    assert said in endpoint["contract"]["faults"][0]
    assert endpoint["latency"]["state"] == "not tried"


@pytest.mark.parametrize(
    ("headers", "shown"),
    [
        ({"Retry-After": "7"}, "7 (seconds)"),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, "Wed, 21 Oct 2026 07:28:00 GMT (date)"),
        ({"Retry-After": "soon\x1b[31m"}, "soon [31m (neither seconds nor a date)"),  # nothing a terminal would obey
        ({"Retry-After": "2", "Retry-After-Ms": "1500"}, "2 (seconds), 1500 (Retry-After-Ms)"),
    ],
    ids=["seconds", "date", "other", "milliseconds"],
)
def test_retry_after_is_shown_with_its_form(headers, shown):
    exchange = TOOL["Exchange"]("answered", 0.1, 429, b"", headers)
    assert TOOL["shown_retry_after"](TOOL["target_of"]("http://127.0.0.1:8801"), exchange) == shown


def test_failures_among_good_answers_halve_the_suggested_concurrency(serve):
    # Number 0 is the contract check. Of 1 to 6, the odd ones are refused.
    server = serve(lambda number: (503, {}, b"") if number % 2 else (200, {}, GOOD))
    code, report = examine(server.url, "--concurrency", "4")
    assert (code, report["endpoints"]["8b"]["latency"]["outcomes"]) == (1, {"503": 3, "200": 3})
    assert (report["verdict"]["ready"], report["verdict"]["rag_max_concurrency"]) == (False, 2)


def test_a_redirect_is_reported_and_not_followed(serve):
    other = serve(200, {}, GOOD)
    location = f"{other.url}/login?token={KEY}"
    for status in (302, 307):
        server = serve(status, {"Location": location}, b"")
        result = run(ENDPOINTS, "--base-url", server.url, "--only", "8b", "--key-env", "KEY_VARIABLE")
        assert result.returncode == 1
        assert f"answered {status}, a redirect to {other.url}/login, expected 200" in result.stdout
    assert other.asked == []


# Answers that break the contract.

WRONG_TYPES = {
    "answer": None,
    "passages": [
        {"id": 7, "text": "...", "score": "0.5"},
        {"id": "d2", "score": True},
        "d3",
        {"id": "d4", "text": ["..."], "score": 1.5},
    ],
    "took_ms": -1,
}
WRONG_TYPES_FAULTS = [
    "answer is null, expected a string",
    "took_ms is -1, expected a number of at least 0",
    "passages[0].id is 7, expected a string",
    "passages[0].score is a string, expected a number in [0, 1]",
    "passages[1].text is missing, expected a string",
    "passages[1].score is true, expected a number in [0, 1]",
    "passages[2] is a string, expected an object with id, text and score",
    "passages[3].text is a list, expected a string",
    "passages[3].score is 1.5, expected a number in [0, 1]",
    "passages has 4 entries, expected at most top_k, which was 3",
]


def with_scores(*scores):
    return {**GOOD, "passages": [{"id": "d", "text": "...", "score": score} for score in scores]}


@pytest.mark.parametrize(
    ("body", "faults"),
    [
        (WRONG_TYPES, WRONG_TYPES_FAULTS),
        ([GOOD], ["the body is a list, expected an object with answer, passages and took_ms"]),
        (
            with_scores(0.5, 0.2, 0.4),
            ["passages[2].score is 0.4 after 0.2, expected the best passage first; sort them"],
        ),
        (
            json.dumps({**GOOD, "took_ms": 0}).replace(": 0}", ": 1e999}").encode(),
            ["took_ms is a number that is not finite, expected a number of at least 0"],
        ),
        (b'{"took_ms": NaN}', ["the body of 16 bytes holds NaN or Infinity, expected a JSON object"]),
        ({**GOOD, "answer": "\ud83d"}, ["answer is a string with half a surrogate pair, expected a string"]),
        (
            b"<html>Sign in</html>",
            [
                "the body of 20 bytes is not JSON, expected a JSON object; it looks like HTML: a login or error page, "
                "or another address"
            ],
        ),
        (
            b"\x1f\x8b{}",
            ["the body of 4 bytes is not UTF-8, expected JSON in UTF-8; it is compressed, which was not asked for"],
        ),
        (b'{"answer": "", "answer": "a"}', ["the body of 29 bytes has a key twice, expected a JSON object"]),
    ],
)
def test_every_fault_of_a_body_is_named(body, faults):
    assert faults_of(body) == faults


def faults_of(body):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    faults = TOOL["read_answer"](TOOL["Exchange"]("answered", 0.1, 200, content), 3, make_request_id())[1]
    return faults


# Time.


def drip(first):
    """A body that begins at once and then sends a byte every 0.2 s, for 8 s."""

    def write(stream):
        stream.write(first)
        for _ in range(40):
            time.sleep(0.2)
            stream.write(b" ")

    return write


HEADERS = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n"


@pytest.mark.parametrize("first", [HEADERS + b"\r\n{", HEADERS + b"X-Slow: "], ids=["body", "headers"])
def test_a_drip_past_the_timeout_is_a_timeout(serve, first):
    code, report = examine(serve(200, {}, drip(first)).url, "--timeout", "1")
    endpoint = report["endpoints"]["8b"]
    assert (code, endpoint["contract"]["outcome"], endpoint["latency"]["state"]) == (1, "timeout", "not tried")
    check_seconds(endpoint["contract"]["seconds"], least=1.0, most=1.5)


# What is not told.


@pytest.mark.parametrize(
    "arguments", [(), ("--json",), ("--show-answers",), ("--show-answers", "--json"), ("--quick",)], ids=str
)
def test_a_key_that_the_service_echoes_everywhere_is_not_printed(serve, arguments):
    echo = {**GOOD, "answer": f"Bearer {KEY}", "passages": [{"id": KEY, "text": KEY, "score": 0.5}]}
    replies = [(200, {}, echo), (429, {"Retry-After": KEY}, echo), (302, {"Location": f"http://{KEY}/{KEY}"}, b"")]
    server = serve(lambda number: replies[number % 3])
    result = run(ENDPOINTS, "--base-url", server.url, "--key-env", "KEY_VARIABLE", "--requests", "6", *arguments)
    assert server.asked[0][1]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in result.stdout + result.stderr
    assert ("Bearer <KEY_VARIABLE>" in result.stdout) == bool({"--show-answers", "--quick"}.intersection(arguments))


def test_a_proxy_is_named_and_gets_no_request(serve):
    proxy, server = serve(200, {}, GOOD), serve(200, {}, GOOD)
    url = proxy.url.replace("//", f"//user:{KEY}@")
    result = run(ENDPOINTS, "--base-url", server.url, "--requests", "1", HTTP_PROXY=url, all_proxy=url)
    assert result.returncode == 0
    assert "used neither by training nor by this tool: HTTP_PROXY, all_proxy\n" in result.stdout
    assert KEY not in result.stdout
    assert proxy.asked == []


@pytest.fixture(name="misuse")
def fixture_misuse(monkeypatch, capsys):
    """Runs the tool in this process, where it ends at its command line with 2: what it said on stderr."""

    def misuse(*arguments):
        monkeypatch.setattr(sys, "argv", [str(ENDPOINTS), *arguments])
        with pytest.raises(SystemExit, match="2"):
            runpy.run_path(str(ENDPOINTS), run_name="__main__")
        told = capsys.readouterr()
        assert told.out == ""
        return told.err

    return misuse


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--base-url", "rag.example.com"),
        ("--base-url", f"http://user:{KEY}@127.0.0.1"),
        ("--base-url", f"http://user:{KEY}@127.0.0.1:port"),
        ("--base-url", f"http://127.0.0.1?key={KEY}"),
        ("--base-url", "http://127.0.0.1", "--key-env", KEY),
        ("--base-url", "http://127.0.0.1", "--timeout", "0"),
    ],
    ids=["no-url", "no-scheme", "password", "password-and-port", "query", "key-for-its-name", "timeout"],
)
def test_wrong_usage_ends_with_2_and_shows_no_secret(arguments, misuse):
    told = misuse(*arguments)
    assert "error:" in told
    assert KEY not in told


# One question.


def test_the_quick_look_prints_passages_and_answer_to_a_question_of_ones_own(serve):
    passages = [{"id": "d1", "text": "...", "score": 0.5}, {"id": "d2\x1b[2J", "text": "...", "score": 0.25}]
    server = serve(200, {}, {**GOOD, "answer": "It costs 5980 yuan.\x1b[2J\n周三晚上七点半。", "passages": passages})
    given = ("--query", "Python price", "--profile", "nurse", "--summary", "asked", "--context", "customer: hi")
    result = run(ENDPOINTS, "--base-url", server.url, "--quick", *given, "--top-k", "2", "--score-threshold", "0.1")
    assert (result.returncode, result.stderr) == (0, "")
    assert "    0.500  d1\n    0.250  d2 [2J\n    answer: It costs 5980 yuan. [2J 周三晚上七点半。\n" in result.stdout
    assert "latency   not tried            --quick asks one question" in result.stdout
    ((path, _, body),) = server.asked
    asked = json.loads(body)
    assert (path, asked["rewritten_query"], asked["user_profile"]) == ("/v1/rag/8b", "Python price", "nurse")
    assert (asked["history_summary"], asked["context"]) == ("asked", "customer: hi")
    assert (asked["top_k"], asked["score_threshold"]) == (2, 0.1)
    assert run(ENDPOINTS, "--base-url", serve(401).url, "--quick").returncode == 1
