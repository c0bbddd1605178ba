"""The tool that users run against their own RAG service. `test_preflight_services` has the load and the contract."""

import json
import re
import shutil
import socket
import ssl
import subprocess
from contextlib import ExitStack

import pytest
from pytest_httpserver import HTTPServer
from test_rag_endpoints import connection, main
from werkzeug import Response

KEY = "sk-test-7d2f81c0"
GOOD = {"answer": "It costs 5980 yuan.", "passages": [{"id": "d1", "text": "...", "score": 0.5}], "took_ms": 1.5}
SHORT = ("--requests", "6", "--concurrency", "2", "--json")


@pytest.fixture
def serve():
    """Starts a server that answers POST with a status, headers and a body, and anything else with 404."""
    with ExitStack() as stack:

        def serve(status=200, headers=None, body=GOOD, *, tls=None):
            server = stack.enter_context(HTTPServer(host="127.0.0.1", port=0, ssl_context=tls, threaded=True))
            server.asked, server.url = [], server.url_for("").rstrip("/")

            def answer(request):
                if request.method != "POST":
                    return Response(status=404)
                server.asked.append((request.path, request.headers, request.json))
                content = body if isinstance(body, bytes) else json.dumps(body)
                return Response(content, status, headers, content_type="application/json")

            server.expect_request(re.compile(".*")).respond_with_handler(answer)
            return server

        yield serve


@pytest.fixture
def examine(capsys):
    def examine(url, *arguments):
        code = main(["--base-url", url, *SHORT, *arguments])
        return code, json.loads(capsys.readouterr().out)

    return examine


def stages_of(report):
    return {stage["stage"]: stage["verdict"] for stage in report["stages"]}


def test_a_good_service_is_ready_with_figures_and_settings(serve, examine):
    server = serve()
    code, report = examine(server.url, "--rag_top_k", "5")
    assert (code, stages_of(report)) == (0, {"DNS": "passed", "TCP": "passed", "rag": "noted"})  # no /healthz
    figures = report["stages"][2]["figures"]
    assert (figures["rag_8b_calls"], figures["rag_32b_calls"]) == (6, 6)
    # Both at once were answered; three times a p95 of milliseconds is below the least timeout of 5 s.
    assert report["suggested"] == {"rag.max_concurrency": 2, "rag.timeout_s": 5}
    assert {path for path, _, _ in server.asked} == {"/v1/rag/8b", "/v1/rag/32b"}
    assert {body["top_k"] for _, _, body in server.asked} == {5}


def test_an_unknown_host_fails_at_dns_and_nothing_after_it_is_tried(examine):
    code, report = examine("http://no-such-host.invalid")
    assert (code, stages_of(report), report["suggested"]) == (1, {"DNS": "failed"}, {})
    assert "getent hosts no-such-host.invalid" in report["stages"][0]["findings"][0]["remedy"]


def test_a_port_where_nothing_listens_fails_at_tcp(examine):
    with socket.socket() as reserved:  # bound but not listening: nobody else gets the port
        reserved.bind(("127.0.0.1", 0))
        code, report = examine(f"http://127.0.0.1:{reserved.getsockname()[1]}")
    assert (code, stages_of(report)) == (1, {"DNS": "passed", "TCP": "failed"})
    assert report["stages"][1]["findings"][0]["remedy"].startswith("Refused: nothing listens on that port")


CA = """
[ca]
default_ca = own
[own]
database = index.txt
new_certs_dir = .
rand_serial = yes
default_md = sha256
policy = names
x509_extensions = extensions
[names]
commonName = supplied
[extensions]
subjectAltName = {names}
basicConstraints = CA:TRUE
"""


@pytest.mark.parametrize(
    ("names", "ends", "trusted", "said"),
    [
        ("IP:127.0.0.1", "20990101000000Z", True, None),
        ("IP:127.0.0.1", "20990101000000Z", False, "self-signed certificate"),
        ("IP:127.0.0.1", "20200201000000Z", True, "certificate has expired"),
        ("DNS:other.example", "20990101000000Z", True, "IP address mismatch"),
    ],
    ids=["trusted", "self-signed", "expired", "other host"],
)
def test_a_certificate_is_shown_or_refused_before_any_request(
    serve, examine, tmp_path, monkeypatch, names, ends, trusted, said
):
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command to make certificates")
    (tmp_path / "index.txt").touch()
    (tmp_path / "ca.cnf").write_text(CA.format(names=names), encoding="utf-8")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    files = ("-in", "request.pem", "-keyfile", "key.pem", "-out", "certificate.pem")
    dates = ("-startdate", "20200101000000Z", "-enddate", ends)
    for call in (
        ("req", "-new", *curve, "-keyout", "key.pem", "-out", "request.pem", "-subj", "/CN=rag"),
        ("ca", "-selfsign", "-batch", "-notext", "-config", "ca.cnf", *dates, *files),
    ):
        subprocess.run([openssl, *call], cwd=tmp_path, capture_output=True, check=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
    server = serve(tls=tls)
    if said is None:
        [*_, stage] = connection(server.url)
        assert (stage.verdict, stage.figures["expires"]) == ("passed", "Jan  1 00:00:00 2099 GMT")
        return
    code, report = examine(server.url)
    assert (code, stages_of(report)["TLS"], server.asked) == (1, "failed", [])
    finding = report["stages"][2]["findings"][0]
    assert said in finding["text"] and "SSL_CERT_FILE, for training too" in finding["remedy"]


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (302, b"", "redirects (302), which is not followed"),
        (200, b"<html>Sign in</html>", "a web page (HTML)"),
        (200, {"answer": None, "passages": [{"id": 7, "score": 1.5}]}, "answer (string_type), passages.0.id (string_"),
    ],
)
def test_what_is_no_answer_is_told_at_the_first_call(serve, examine, status, body, said):
    server = serve(status, {"Location": f"http://127.0.0.1/?token={KEY}"}, body)
    code, report = examine(server.url)
    assert (code, stages_of(report)["rag"], len(server.asked)) == (1, "failed", 2)  # one to each endpoint
    finding = report["stages"][2]["findings"][-1]
    assert said in finding["text"] and KEY not in finding["text"]


def test_a_key_that_the_service_echoes_is_not_printed(serve, capsys, monkeypatch):
    monkeypatch.setenv("KEY_VARIABLE", KEY)
    echo = {**GOOD, "answer": f"Bearer {KEY}", "passages": [{"id": KEY, "text": KEY, "score": 0.5}]}
    server = serve(body=echo)
    for look in (("--quick",), ("--quick", "--json"), SHORT):
        assert main(["--base-url", server.url, "--key-env", "KEY_VARIABLE", *look]) == 0
        told = "".join(capsys.readouterr())
        assert KEY not in told and ("Bearer <the key>" in told) == ("--quick" in look)
    assert server.asked[0][1]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--base-url", "rag.example.com"),
        ("--base-url", f"http://user:{KEY}@127.0.0.1"),
        ("--base-url", f"http://127.0.0.1?key={KEY}"),
        ("--base-url", "http://127.0.0.1", "--key-env", KEY),
        ("--base-url", "http://127.0.0.1", "--requests", "x"),
    ],
    ids=["no-url", "no-scheme", "password", "query", "key-for-its-name", "requests"],
)
def test_wrong_usage_ends_with_2_and_shows_no_secret(arguments, capsys):
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == "" and "ConfigError" in told.err and KEY not in told.err


def test_the_quick_look_prints_passages_and_answer_to_a_question_of_ones_own(serve, capsys):
    passages = [{"id": "d1", "text": "...", "score": 0.5}, {"id": "d2\x1b[2J", "text": "...", "score": 0.25}]
    server = serve(body={**GOOD, "answer": "It costs 5980 yuan.\x1b[2J\n周三晚上七点半。", "passages": passages})
    given = ("--query", "Python price", "--profile", "nurse", "--summary", "asked", "--context", "customer: hi")
    assert main(["--base-url", server.url, "--quick", *given, "--rag_score_threshold", "0.1"]) == 0
    printed = capsys.readouterr().out
    assert "  - 0.500  d1\n  - 0.250  d2 [2J\n  - It costs 5980 yuan. [2J 周三晚上七点半。\n" in printed
    ((path, _, asked),) = server.asked
    assert (path, asked["rewritten_query"], asked["user_profile"]) == ("/v1/rag/8b", "Python price", "nurse")
    assert (asked["history_summary"], asked["context"], asked["score_threshold"]) == ("asked", "customer: hi", 0.1)
