#!/usr/bin/env python3
"""Checks whether a RAG service is ready for training: the connection, the form of its answers, their speed.

    python3 scripts/test_rag_endpoints.py --base-url https://rag.example.com --key-env RAG_KEY
    python3 scripts/test_rag_endpoints.py --base-url http://127.0.0.1:8801 --quick --query "Python data analysis price"

It tries the stages of a connection (DNS, TCP, TLS, HTTP), holds an answer of each endpoint against the contract in
docs/SERVICES.md, measures latencies, and suggests settings. With --quick it asks the 8B endpoint one question, and
prints the passages and the answer.

- It connects as training does: without a proxy, with the system's certificates, without following a redirect.
- It retries nothing: every failure shall be seen.
- It prints no key. It prints no text of an answer without --show-answers or --quick.
- It needs the standard library of any Python from 3.9 on and nothing else: a copy runs where nothing is installed.

Exit code: 0 ready; 1 not ready, with the reasons printed; 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import json
import math
import os
import queue
import re
import secrets
import select
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

EXIT_OK = 0
EXIT_NOT_READY = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

MAX_BODY_BYTES = 4 * 1024 * 1024
"""Longest answer that is read. An answer with its passages is far shorter."""
READ_BYTES = 64 * 1024
MAX_STAGE_S = 10.0
"""Longest time for one stage of the connection. A cold load balancer needs less, and a person can wait for it."""
MAX_ADDRESSES = 16
"""Most addresses of one host that are tried. Load balancers give out fewer."""
MAX_CONCURRENCY = 256
"""Most connections at once: `select`, and the usual limit of 1,024 open files, allow a few times as many."""
MAX_FAULTS_SHOWN = 20
"""Most faults of one answer in the text. --json holds all."""
MAX_FOREIGN_CHARS = 200
"""Characters of a header, or of a certificate's name, that are shown."""
EXPIRY_WARNING_DAYS = 14
"""A certificate that expires sooner may expire during a run."""

TIMEOUT_MARGIN = 3
"""`rag_timeout_s` is so many times the slower p99: training asks both endpoints at once, and for hours."""
MIN_TIMEOUT_S = 5
"""Shortest timeout that is suggested: a garbage collection, or a restart behind a balancer, takes seconds."""

TIMEOUTS = (TimeoutError, socket.timeout)
"""Two classes before Python 3.10, one since."""
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
ENDPOINTS = ("8b", "32b")
REQUEST_ID_HEADER = "X-Request-Id"
REQUEST_ID = re.compile(r"salesrl-[0-9a-f]{16}")
NO_ID = "not returned (optional): answers that the service mixes up can't be told; see docs/SERVICES.md"
FAILED_WORDS = frozenset(
    {"error", "failed", "failure", "fail", "busy", "overloaded", "unavailable", "timeout", "throttled", "rate_limited"}
)
"""Training treats an answer with such a `status` as a failure."""
RETRYABLE_STATUSES = frozenset({408, 409, 425, 429})
"""Statuses 4xx that training repeats. It repeats every 5xx too."""

QUESTIONS = (
    ("How much does the beginner course cost?", "office worker, free in the evenings", "asked about courses"),
    ("零基础的课程多少钱？", "上班族，只有晚上有空", "问过有哪些课程"),
    ("When do the weekend classes start?", "parent of a ten-year-old", "wants classes on Saturdays"),
    ("周末班几点开始上课？", "孩子十岁，想周六上课", "已经介绍过周末班"),
    ("Can I get a refund if I stop halfway?", "careful with money", "was told the price"),
    ("中途不想学了可以退款吗？", "比较在意费用", "已经告知价格"),
)
"""(question, profile, summary), English and Chinese in turn. A service need not know their subject."""


# The requests.


@dataclass
class Target:
    """The service, and what is known of the way to it."""

    url: str
    """The base URL without a slash at its end."""
    scheme: str
    host: str
    port: int
    prefix: str
    """Path before `/v1/rag/...`; mostly empty."""
    key: str | None = None
    key_env: str | None = None
    addresses: list[tuple[int, Any]] = field(default_factory=list)
    """(family, socket address) of each, from the DNS stage. The TCP stage removes those that cannot be reached."""
    speaks_http: bool = False
    """Whether the HTTP stage got an answer, of any status."""

    def clean(self, text: str, limit: int = MAX_FOREIGN_CHARS) -> str:
        """Foreign text that may be printed: without the key, and without control characters."""
        if self.key:
            text = text.replace(self.key, f"<{self.key_env}>")
        text = "".join(each if each.isprintable() else " " for each in text)
        return text if len(text) <= limit else text[:limit] + "..."


def make_request_id() -> str:
    """An id in the form that training gives each request."""
    return f"salesrl-{secrets.token_hex(8)}"


def request_of(endpoint: str, number: int, options: argparse.Namespace, request_id: str) -> bytes:
    """The body of the `number`-th request to an endpoint. The options' own question replaces those of the tool."""
    question, profile, summary = QUESTIONS[number % len(QUESTIONS)]
    question = options.query or question
    body: dict[str, Any] = {"context": options.context or f"customer: {question}"}
    if endpoint == "8b":
        body.update(dict.fromkeys(("tenant_id", "contact_id", "account_id", "message_id"), ""))
        body.update(user_profile=options.profile or profile, rewritten_query=question)
        body.update(history_summary=options.summary or summary)
    body.update(score_threshold=options.score_threshold, top_k=options.top_k, request_id=request_id)
    return json.dumps(body, ensure_ascii=False).encode()


@dataclass(frozen=True)
class Exchange:
    """One request and its result."""

    outcome: str
    """`answered`, `timeout`, `refused`, `connection lost`, `TLS failure`, `not HTTP` or `too large`."""
    seconds: float
    status: int = 0
    content: bytes = b""
    headers: Any = field(default_factory=dict)


class TooLarge(Exception):
    """An answer is longer than `MAX_BODY_BYTES`."""


class Connection(http.client.HTTPConnection):
    """A keep-alive connection for one thread, to an address that is known to work."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.host, target.port)
        self.default_port = 443 if target.scheme == "https" else 80
        self.opened = 0
        self._target, self._timeout_s, self._late = target, 0.0, threading.Event()

    def connect(self) -> None:
        self.sock = open_socket(self._target, self._timeout_s)
        self.opened += 1
        if self._late.is_set():
            raise TimeoutError

    def _cut_off(self) -> None:
        """End all reads and writes of a request. A read's own timeout would begin anew with every byte."""
        self._late.set()
        with contextlib.suppress(OSError, TypeError):  # closed meanwhile, or not yet open
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def ask(
        self, method: str, path: str, body: bytes | None, timeout_s: float, request_id: str | None = None
    ) -> Exchange:
        """Send one request and read its whole answer, both within `timeout_s` seconds."""
        started = time.perf_counter()
        self._timeout_s, self._late = timeout_s, threading.Event()
        timer = threading.Timer(timeout_s, self._cut_off)
        timer.daemon = True
        timer.start()
        try:
            if self.sock is not None and select.select([self.sock], [], [], 0)[0]:
                self.close()  # bytes between two answers: the other side has closed
            headers = {"Accept": "application/json", "User-Agent": "test_rag_endpoints"}
            headers.update({"Content-Type": "application/json"} if body is not None else {})
            headers.update({REQUEST_ID_HEADER: request_id} if request_id is not None else {})
            headers.update({"Authorization": f"Bearer {self._target.key}"} if self._target.key else {})
            self.request(method, self._target.prefix + path, body, headers)
            with self.getresponse() as response:
                content = read_bounded(response)
            if self._late.is_set():
                raise TimeoutError
        except (OSError, http.client.HTTPException, TooLarge) as error:
            self.close()
            outcome = "timeout" if self._late.is_set() else outcome_of(error)
            return Exchange(outcome, time.perf_counter() - started)
        finally:
            timer.cancel()
        return Exchange("answered", time.perf_counter() - started, response.status, content, response.headers)


def open_socket(target: Target, timeout_s: float, context: ssl.SSLContext | None = None) -> socket.socket:
    """A connection to the first address that works, with TLS if the URL says https."""
    deadline = time.monotonic() + timeout_s
    family, address = target.addresses[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if target.scheme == "https":
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock = (context or system_context()).wrap_socket(sock, server_hostname=target.host)
            sock.settimeout(timeout_s)
    except BaseException:
        sock.close()
        raise
    return sock


@functools.cache  # reading the store takes longer than a handshake
def system_context() -> ssl.SSLContext:
    """TLS, checked as in training: against the system's store, or the one named by SSL_CERT_FILE or SSL_CERT_DIR."""
    return ssl.create_default_context()


def read_bounded(response: http.client.HTTPResponse) -> bytes:
    content = bytearray()
    while part := response.read(READ_BYTES):
        content += part
        if len(content) > MAX_BODY_BYTES:
            raise TooLarge
    if response.length:  # `read` with a size does not raise when the other side breaks off
        raise http.client.IncompleteRead(b"")
    return bytes(content)


def outcome_of(error: Exception) -> str:
    """The outcome of an exception. The order matters: some of these classes are subclasses of others."""
    outcomes = (
        (TIMEOUTS, "timeout"),
        (ConnectionRefusedError, "refused"),
        (ssl.SSLError, "TLS failure"),
        ((OSError, http.client.IncompleteRead), "connection lost"),
        (TooLarge, "too large"),
    )
    return next((name for kinds, name in outcomes if isinstance(error, kinds)), "not HTTP")


# The stages of a connection.


@dataclass(frozen=True)
class Stage:
    """One stage of the connection."""

    name: str
    state: str
    """`ok`, `failed` or `not tried`."""
    seconds: float = 0.0
    got: str = ""
    advice: str = ""
    """Usual causes and what to try; empty without a fault."""


class StageFailed(Exception):
    """A stage failed. Holds what was got, and the usual causes and what to try."""

    def __init__(self, got: str, advice: str) -> None:
        super().__init__(got)
        self.got, self.advice = got, advice


def diagnose(target: Target, timeout_s: float) -> Iterator[Stage]:
    """Yield each stage when it is over. After a failed stage no other is tried."""
    steps = {"DNS": look_up, "TCP": connect_to_each, "TLS": shake_hands, "HTTP": ask_for_health}
    failed = ""
    for name, step in steps.items():
        if failed:
            yield Stage(name, "not tried", got=f"{failed} failed")
            continue
        started = time.perf_counter()
        try:
            got = step(target, min(timeout_s, MAX_STAGE_S))
            yield Stage(name, "ok", time.perf_counter() - started, got)
        except StageFailed as error:
            failed = name
            yield Stage(name, "failed", time.perf_counter() - started, error.got, error.advice)


def look_up(target: Target, timeout_s: float) -> str:
    """DNS: the addresses of the host."""
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            results.put(socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            results.put(error)

    threading.Thread(target=resolve, daemon=True).start()  # it has no timeout of its own
    advice = (
        "Usual causes: a typing error in the name, or a name that only another network or a VPN knows. "
        f"Try `getent hosts {target.host}` here and where the name is known to work."
    )
    try:
        result = results.get(timeout=timeout_s)
    except queue.Empty:
        raise StageFailed(f"no answer about {target.host} within {timeout_s:g} s", advice) from None
    if isinstance(result, Exception):
        reason = getattr(result, "strerror", None) or "not a valid host name"
        raise StageFailed(f"no address for {target.host} ({reason})", advice)
    target.addresses = list(dict.fromkeys((entry[0], entry[4]) for entry in result))[:MAX_ADDRESSES]
    return ", ".join(address[0] for _, address in target.addresses)


TCP_ADVICE = {
    "refused": "Refused: nothing listens on that port, or only on its own machine's loopback. Look at the port, and "
    "whether the service listens on 0.0.0.0.",
    "timed out": "Timed out: a firewall drops it, or a VPN is off. Try `nc -vz HOST PORT` from another machine.",
    "no way": "No way there: another network, or IPv6 without a route. Look at the VPN and at `ip route`.",
}
"""Usual causes and remedies, by the failure of an address."""


def connect_to_each(target: Target, timeout_s: float) -> str:
    """TCP: a connection to every address. One that works is enough."""
    with ThreadPoolExecutor(len(target.addresses)) as pool:
        tried = list(pool.map(lambda address: connect_once(address, timeout_s), target.addresses))
    got = "; ".join(text for _, text in tried)
    working = [target.addresses[index] for index, (reached, _) in enumerate(tried) if reached]
    if not working:
        advice = [text for failure, text in TCP_ADVICE.items() if failure in got]
        proxies = set_variables(PROXY_VARIABLES)
        advice += [f"{', '.join(proxies)} set here: training needs a way without a proxy."] if proxies else []
        raise StageFailed(got, " ".join(advice))
    target.addresses = working
    return got


def connect_once(address: tuple[int, Any], timeout_s: float) -> tuple[bool, str]:
    """Whether one address can be reached, and a text about it."""
    family, place = address
    name = f"{place[0]} port {place[1]}"
    started = time.perf_counter()
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            sock.connect(place)
    except TIMEOUTS:
        return False, f"{name}: timed out after {timeout_s:g} s"
    except ConnectionRefusedError:
        return False, f"{name}: refused"
    except OSError as error:
        return False, f"{name}: no way there ({error.strerror or type(error).__name__})"
    return True, f"{name}: connected in {milliseconds(time.perf_counter() - started)}"


CERTIFICATE_FAULTS = {
    9: ("it is not valid yet", "the clock of this machine or of the one that made it is wrong; compare `date`"),
    10: ("it has expired", "renew the service's certificate, and have it renewed by a program"),
    18: ("it is self-signed", "add it to the system's store, or have an authority sign one"),
    19: ("its chain ends in an authority that is not trusted here", "add that authority to the system's store"),
    20: ("nobody who is trusted here has signed it", "add its authority to the system's store"),
    21: ("its chain is incomplete", "have the service send its intermediate certificates too"),
    62: ("it is for another host name", "use a name that it is for, or have one made for this name"),
    64: ("it is for another address", "use the host's name in place of its address"),
}
"""The fault and its remedy, by OpenSSL's verify code."""
STORE_ADVICE = (
    "(Debian: /usr/local/share/ca-certificates and update-ca-certificates), or name its file in SSL_CERT_FILE, for "
    "training too"
)
TLS_FAULTS = {
    "WRONG_VERSION_NUMBER": "the port speaks something else than TLS, probably plain HTTP; try http:// in the URL",
    "RECORD_LAYER_FAILURE": "the port speaks something else than TLS, probably plain HTTP; try http:// in the URL",
    "UNSUPPORTED_PROTOCOL": "the service offers only protocols older than TLS 1.2; have it offer TLS 1.2 or 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the service shares no TLS version with this machine; have it offer TLS 1.2",
    "TLSV1_UNRECOGNIZED_NAME": "the service knows no such host name; use the name that it is configured for",
}
"""The usual cause and its remedy, by OpenSSL's reason."""


def shake_hands(target: Target, timeout_s: float) -> str:
    """TLS: the handshake, and the certificate that it showed."""
    if target.scheme == "http":
        return "not used, since the URL starts with http://"
    try:
        with open_socket(target, timeout_s) as sock:
            certificate = described_certificate(target, sock.getpeercert())
            return f"{sock.version()}, {certificate}"
    except ssl.SSLCertVerificationError as error:
        code, reason = error.verify_code, target.clean(error.verify_message)
        fault, advice = CERTIFICATE_FAULTS.get(code, (reason, "mend the service's certificate"))
        shown = described_certificate(target, unchecked_certificate(target, timeout_s))
        store = f" {STORE_ADVICE}" if "store" in advice else ""
        raise StageFailed(f"a certificate that is refused: {fault}. {shown}", f"{advice}{store}") from None
    except TIMEOUTS:
        advice = "Usual causes: the port speaks plain HTTP (try http:// in the URL), or the service hangs"
        raise StageFailed(f"no handshake within {timeout_s:g} s", advice) from None
    except ssl.SSLError as error:
        reason = error.reason or type(error).__name__
        usual = "Usual causes: the port speaks plain HTTP (try http:// in the URL), or no cipher is shared"
        raise StageFailed(f"no handshake ({reason})", TLS_FAULTS.get(reason, usual)) from None
    except OSError as error:
        advice = "Usual causes: a load balancer without a service behind it, or a port that speaks no TLS"
        raise StageFailed(f"the connection broke off ({type(error).__name__})", advice) from None


def unchecked_certificate(target: Target, timeout_s: float) -> dict[str, Any]:
    """The refused certificate, from a connection on which nothing is sent. Empty if it cannot be read."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with open_socket(target, timeout_s, context) as sock, tempfile.NamedTemporaryFile("w") as file:
            file.write(ssl.DER_cert_to_PEM_cert(sock.getpeercert(binary_form=True)))
            file.flush()
            return ssl._ssl._test_decode_cert(file.name)  # the only decoder in the standard library is private
    except (OSError, ValueError, AttributeError):
        return {}


def described_certificate(target: Target, certificate: dict[str, Any]) -> str:
    """Owner and end of a certificate: `"certificate of commonName=..., for ..., expires 2027-01-01 ..."`."""
    if not certificate:
        return "certificate that could not be read"
    names = [name for _, name in certificate.get("subjectAltName", ())]
    ends_s = ssl.cert_time_to_seconds(certificate["notAfter"])
    days = math.floor((ends_s - time.time()) / 86_400)
    expiry = f"{time.strftime('%Y-%m-%d', time.gmtime(ends_s))} ({days} days)"
    warning = "; it may end within a run" if 0 <= days < EXPIRY_WARNING_DAYS else ""
    return target.clean(
        f"certificate of {distinguished(certificate['subject'])}, for {', '.join(names[:5]) or 'no host'}, issued by "
        f"{distinguished(certificate['issuer'])}, expires {expiry}{warning}",
        3 * MAX_FOREIGN_CHARS,
    )


def distinguished(name: Sequence[Any]) -> str:
    return ", ".join(f"{key}={value}" for part in name for key, value in part) or "nobody"


def ask_for_health(target: Target, timeout_s: float) -> str:
    """HTTP: an answer to GET /healthz that training accepts before a run."""
    connection = Connection(target)
    exchange = connection.ask("GET", "/healthz", None, timeout_s)
    connection.close()
    status = exchange.status
    if exchange.outcome != "answered":
        raise StageFailed(f"GET /healthz: {exchange.outcome} after {exchange.seconds:.1f} s", http_advice(target))
    target.speaks_http = True
    if status in (401, 403) or status >= 500:
        raise StageFailed(f"GET /healthz answered {status}", status_advice(target, status))
    if 300 <= status < 400:
        return f"GET /healthz answered {status} to {redirect_of(target, exchange)}, which is not followed"
    return f"GET /healthz answered {status}" + (", so there is no health check: fine" if status == 404 else "")


def http_advice(target: Target) -> str:
    if target.scheme == "http":
        return "Usual causes: the port speaks TLS (try https:// in the URL), or the service hangs."
    return "Usual causes: the service asks for a client certificate, which training does not have, or it hangs."


# The contract of an answer.


@dataclass
class Contract:
    """One answer of an endpoint, compared with the contract."""

    state: str = "not tried"
    """`ok`, `failed` or `not tried`."""
    seconds: float = 0.0
    outcome: str = ""
    """As in `outcome_name`."""
    faults: list[str] = field(default_factory=list)
    passages: int | None = None
    best_score: float | None = None
    took_ms: float | None = None
    retry_after: str | None = None
    id_returned: list[str] = field(default_factory=list)
    """The places that returned the request's id: `header`, `body`. A service need not return it."""
    answer: str | None = None
    """Only with --show-answers or --quick."""
    found: list[str] | None = None
    """Score and id of each passage; only with --quick."""


def check_contract(target: Target, endpoint: str, options: argparse.Namespace) -> Contract:
    """Ask an endpoint once and check its whole answer."""
    connection = Connection(target)
    request_id = make_request_id()
    request = request_of(endpoint, 0, options, request_id)
    exchange = connection.ask("POST", path_of(endpoint), request, options.timeout, request_id)
    connection.close()
    contract = Contract(seconds=exchange.seconds, retry_after=shown_retry_after(target, exchange))
    if exchange.status != 200:
        contract.faults = [explained(target, endpoint, exchange, options.timeout)]
    else:
        body, contract.faults = read_answer(exchange, options.top_k, request_id)
        if not contract.faults:
            passages = body["passages"]
            contract.id_returned = [name for name, got in ids_in(exchange, body).items() if got == request_id]
            contract.passages, contract.took_ms = len(passages), body["took_ms"]
            contract.best_score = passages[0]["score"] if passages else None
            if options.show_answers or options.quick:
                contract.answer = target.clean(body["answer"], MAX_BODY_BYTES)
            if options.quick:
                contract.found = [f"{it['score']:.3f}  {target.clean(it['id'])}" for it in passages]
    contract.outcome = outcome_name(exchange, contract.faults)
    contract.state = "failed" if contract.faults else "ok"
    return contract


def ids_in(exchange: Exchange, body: Any) -> dict[str, Any]:
    """The values at the places where a service may return the request's id."""
    in_body = body.get("request_id") if isinstance(body, dict) else None
    return {"header": exchange.headers.get(REQUEST_ID_HEADER), "body": in_body}


def read_answer(exchange: Exchange, top_k: int, request_id: str) -> tuple[Any, list[str]]:
    """The body of an answer, and all its faults. A fault names fields and figures, never a text."""
    content = exchange.content
    try:
        body = json.loads(content.decode(), parse_constant=not_json, object_pairs_hook=each_key_once)
    except UnicodeDecodeError:
        packed = "; it is compressed, which was not asked for" if content.startswith(b"\x1f\x8b") else ""
        return None, [f"the body of {len(content)} bytes is not UTF-8, expected JSON in UTF-8{packed}"]
    except (ValueError, RecursionError) as error:
        html = "; it looks like HTML: a login or error page, or another address" if content[:1] == b"<" else ""
        reason = {NotFinite: "holds NaN or Infinity", KeyTwice: "has a key twice"}.get(type(error), "is not JSON")
        return None, [f"the body of {len(content)} bytes {reason}, expected a JSON object{html}"]
    foreign = [
        f"the {name} returns the id of another request, expected this one's or none: answers are mixed up"
        for name, got in ids_in(exchange, body).items()
        if isinstance(got, str) and got != request_id and REQUEST_ID.fullmatch(got)
    ]
    return body, [*foreign, *failure_faults(body), *answer_faults(body, top_k)]


def failure_faults(body: Any) -> list[str]:
    """Fields by which an answer with status 200 says that it failed. Training treats it as a failure too."""
    if not isinstance(body, dict):
        return []
    status = body.get("status")
    stated = [name for name in ("error", "errors") if body.get(name)]
    stated += [name for name in ("success", "ok") if body.get(name) is False]
    stated += ["status"] if isinstance(status, str) and status.lower() in FAILED_WORDS else []
    stated += [name for name in ("status", "code") if type(body.get(name)) is int and 400 <= body[name] < 600]
    return [f"{name} says that it failed, expected a status of 500 or above for that" for name in stated]


class NotFinite(ValueError):
    """A number that JSON does not have."""


def not_json(constant: str) -> None:
    raise NotFinite(constant)


class KeyTwice(ValueError):
    """An object in which a key comes twice. Training does not read it either."""


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise KeyTwice
    return dict(pairs)


def answer_faults(body: Any, top_k: int) -> list[str]:
    """All differences of a body from `{answer, passages: [{id, text, score}], took_ms}`."""
    if not isinstance(body, dict):
        return [f"the body is {described(body)}, expected an object with answer, passages and took_ms"]
    faults = [
        *field_fault(body, "answer", "a string", is_text),
        *field_fault(body, "took_ms", "a number of at least 0", lambda value: is_number(value) and value >= 0),
        *field_fault(body, "passages", "a list", lambda value: isinstance(value, list)),
    ]
    passages = body.get("passages")
    if not isinstance(passages, list):
        return faults
    for index, passage in enumerate(passages):
        where = f"passages[{index}]"
        if not isinstance(passage, dict):
            faults.append(f"{where} is {described(passage)}, expected an object with id, text and score")
            continue
        faults += field_fault(passage, "id", "a string", is_text, where)
        faults += field_fault(passage, "text", "a string", is_text, where)
        faults += field_fault(passage, "score", "a number in [0, 1]", is_score, where)
    if len(passages) > top_k:
        faults.append(f"passages has {len(passages)} entries, expected at most top_k, which was {top_k}")
    scores = [passage.get("score") if isinstance(passage, dict) else None for passage in passages]
    for index in range(1, len(scores)):
        before, after = scores[index - 1 : index + 1]
        if is_number(before) and is_number(after) and before < after:
            got = f"passages[{index}].score is {described(after)} after {described(before)}"
            faults.append(f"{got}, expected the best passage first; sort them")
            break
    return faults


def field_fault(
    record: dict[str, Any], name: str, expected: str, good: Callable[[Any], bool], where: str = ""
) -> list[str]:
    """One fault if the field is missing or unexpected, else none."""
    place = f"{where}.{name}" if where else name
    if name not in record:
        return [f"{place} is missing, expected {expected}"]
    return [] if good(record[name]) else [f"{place} is {described(record[name])}, expected {expected}"]


def is_text(value: Any) -> bool:
    """Whether it is a string that UTF-8 can hold. It cannot hold half a surrogate pair."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def is_number(value: Any) -> bool:
    """Whether it is a finite number. JSON's true and false are no numbers, although Python's are."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def is_score(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1


def described(value: Any) -> str:
    """A value's kind, for a message. A figure may be shown, a text may not."""
    if is_number(value):
        return f"{value:g}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return "a string" if is_text(value) else "a string with half a surrogate pair"
    return {list: "a list", dict: "an object"}.get(type(value), "a number that is not finite")


# Failed requests.


def path_of(endpoint: str) -> str:
    return f"/v1/rag/{endpoint}"


def outcome_name(exchange: Exchange, faults: Sequence[str]) -> str:
    """The name that an exchange is counted under: `200`, another status, `bad body`, or its outcome."""
    if exchange.outcome != "answered":
        return "bad body" if exchange.outcome == "too large" else exchange.outcome
    return "bad body" if exchange.status == 200 and faults else str(exchange.status)


def explained(target: Target, endpoint: str, exchange: Exchange, timeout_s: float) -> str:
    """Why an exchange has no good answer: what was got, what was expected, what to do."""
    status = exchange.status
    if 300 <= status < 400:
        return (
            f"answered {status}, a redirect to {redirect_of(target, exchange)}, expected 200; redirects are not "
            "followed, give the final address as --base-url"
        )
    if status:
        at = f" at {target.url}{path_of(endpoint)}" if status in (404, 405) else ""
        return f"answered {status}{at}, expected 200; {status_advice(target, status)}"
    causes = {
        "timeout": f"no complete answer within {timeout_s:g} s; look at the service's own log, or raise --timeout",
        "refused": "connection refused, expected an answer; has the service just stopped?",
        "too large": f"more than {MAX_BODY_BYTES // 2**20} MiB, expected an answer with its passages; look at top_k",
    }
    return causes.get(exchange.outcome, f"{exchange.outcome}, expected an HTTP answer; look at the service's own log")


def status_advice(target: Target, status: int) -> str:
    if status in (401, 403):
        key = f"it refused the key in {target.key_env}" if target.key_env else "no key was sent: name its --key-env"
        return f"{key}; check that variable, and that the service takes `Authorization: Bearer`"
    if status in (404, 405):
        return "--base-url must be the address before /v1/rag, and take POST there"
    if status in (400, 415, 422):
        return "it refused the request's form; it must take the fields that docs/SERVICES.md lists, as JSON"
    if status == 429:
        return "it limits how often it may be asked; raise the limit, or ask with a lower --concurrency"
    return "look at the service's own log" if status >= 500 else "see what the service means by it"


def redirect_of(target: Target, exchange: Exchange) -> str:
    """The target of a redirect, without its query, which may hold a token."""
    try:
        place = urlsplit(exchange.headers.get("Location", ""))
        host = place.netloc.rpartition("@")[2]
    except ValueError:
        return "an address that cannot be read"
    where = f"{place.scheme or target.scheme}://{host}{place.path}" if host else place.path
    return target.clean(where) or "nowhere (no Location)"


def shown_retry_after(target: Target, exchange: Exchange) -> str | None:
    """Retry-After and Retry-After-Ms as they came, with their form; `None` without both."""
    shown = []
    if (seconds := exchange.headers.get("Retry-After")) is not None:
        value = target.clean(seconds.strip())
        is_number_of = value.replace(".", "", 1).isdecimal()
        form = "seconds" if is_number_of else "date" if value.endswith("GMT") else "neither seconds nor a date"
        shown.append(f"{value} ({form})")
    if (milliseconds := exchange.headers.get("Retry-After-Ms")) is not None:
        shown.append(f"{target.clean(milliseconds.strip())} (Retry-After-Ms)")
    return ", ".join(shown) or None


# The latency run.


@dataclass
class Latency:
    """Many requests to one endpoint, several at once."""

    state: str = "not tried"
    """`ok` when every request was answered well; `failed`; `not tried`."""
    reason: str = ""
    """The reason if it was not tried."""
    requests: int = 0
    concurrency: int = 0
    connections: int = 0
    elapsed_s: float = 0.0
    requests_per_s: float = 0.0
    """Requests with status 200 per second."""
    outcomes: dict[str, int] = field(default_factory=dict)
    wall_ms: dict[str, float] = field(default_factory=dict)
    """Percentiles over the requests with status 200. They include the opening of connections."""
    took_ms: dict[str, float] = field(default_factory=dict)
    """Percentiles of the service's own `took_ms`, over the answers that meet the contract."""
    retry_after: dict[str, list[str]] = field(default_factory=dict)
    """The different values of Retry-After, by status."""


def measure(target: Target, endpoint: str, options: argparse.Namespace) -> Latency:
    """Ask an endpoint `--requests` times from `--concurrency` threads, each with a connection of its own."""
    numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(options.requests):
        numbers.put(number)
    connections = [Connection(target) for _ in range(min(options.concurrency, options.requests))]
    outcomes: Counter[str] = Counter()
    wall_ms, took_ms = [], []
    retry_after: dict[str, list[str]] = {}

    def work(connection: Connection) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                request_id = make_request_id()
                body = request_of(endpoint, numbers.get_nowait(), options, request_id)
                exchange = connection.ask("POST", path_of(endpoint), body, options.timeout, request_id)
                is_answer = exchange.status == 200
                answer, faults = read_answer(exchange, options.top_k, request_id) if is_answer else (None, [])
                asked_to_wait, outcome = shown_retry_after(target, exchange), outcome_name(exchange, faults)
                with lock:
                    outcomes[outcome] += 1
                    wall_ms.extend([1000 * exchange.seconds] if is_answer else [])
                    took_ms.extend([answer["took_ms"]] if is_answer and not faults else [])
                    if asked_to_wait is not None and asked_to_wait not in retry_after.setdefault(outcome, []):
                        retry_after[outcome].append(asked_to_wait)
        connection.close()

    # Daemon threads: Ctrl+C does not wait for them.
    lock, threads = threading.Lock(), [threading.Thread(target=work, args=(it,), daemon=True) for it in connections]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed_s = time.perf_counter() - started
    return Latency(
        state="ok" if outcomes["200"] == options.requests else "failed",
        requests=options.requests,
        concurrency=len(connections),
        connections=sum(connection.opened for connection in connections),
        elapsed_s=elapsed_s,
        requests_per_s=len(wall_ms) / elapsed_s,
        outcomes=dict(outcomes.most_common()),
        wall_ms=percentiles(wall_ms),
        took_ms=percentiles(took_ms),
        retry_after=retry_after,
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """By nearest rank: the p-th percentile is the smallest value that at least p % of all do not exceed."""
    ordered = sorted(values)
    if not ordered:
        return {}
    ranks = {f"p{share}": math.ceil(share / 100 * len(ordered)) - 1 for share in (50, 90, 95, 99)}
    return {**{name: ordered[rank] for name, rank in ranks.items()}, "max": ordered[-1]}


# The verdict.


@dataclass
class Verdict:
    """Whether training can start, and with which settings."""

    ready: bool
    reasons: list[str]
    """The reasons if not."""
    rag_max_concurrency: int | None = None
    rag_timeout_s: int | None = None
    rules: list[str] = field(default_factory=list)
    """How the settings were found, or why there are none."""


def judge(stages: Sequence[Stage], results: dict[str, tuple[Contract, Latency]], timeout_s: float) -> Verdict:
    """The verdict, from all stages and both endpoints."""
    reasons = [f"{stage.name} failed" for stage in stages if stage.state == "failed"]
    for endpoint, (contract, latency) in results.items():
        if contract.state == "failed":
            reasons.append(f"{endpoint}: the contract check failed ({contract.outcome})")
        bad = latency.requests - latency.outcomes.get("200", 0)
        if bad:
            reasons.append(f"{endpoint}: {bad} of {latency.requests} requests failed")
    verdict, runs = Verdict(not reasons, reasons), [latency for _, latency in results.values()]
    if not runs or not all(run.outcomes.get("200") for run in runs):
        verdict.rules = ["no settings are suggested, since not every endpoint gave good answers in a latency run"]
        return verdict
    tested = min(run.concurrency for run in runs)
    overloaded = any(set(run.outcomes) - {"200", "bad body"} for run in runs)
    verdict.rag_max_concurrency = max(tested // 2, 1) if overloaded else tested
    verdict.rules.append(
        f"rag_max_concurrency: half of the {tested} that were tried, since some requests failed; try again with it"
        if overloaded
        else f"rag_max_concurrency: the {tested} that were tried, since all were answered; a higher --concurrency may "
        "go well too. It counts the calls of all processes together"
    )
    if any("timeout" in run.outcomes for run in runs):
        verdict.rules.append(f"rag_timeout_s: none, since answers were cut off at {timeout_s:g} s; raise --timeout")
        return verdict
    slowest_s = max(run.wall_ms["p99"] for run in runs) / 1000
    verdict.rag_timeout_s = max(math.ceil(TIMEOUT_MARGIN * slowest_s), MIN_TIMEOUT_S)
    verdict.rules.append(
        f"rag_timeout_s: {TIMEOUT_MARGIN} x the slower endpoint's p99 of {slowest_s:.3g} s in whole seconds, at least "
        f"{MIN_TIMEOUT_S} s"
    )
    return verdict


# The text.


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"


def head_lines(target: Target) -> list[str]:
    key = f"key from {target.key_env}" if target.key_env else "no key"
    unused = set_variables(PROXY_VARIABLES)
    note = [f"note: set here, but used neither by training nor by this tool: {', '.join(unused)}"] if unused else []
    return [f"RAG service at {target.url} ({key})", *note, ""]


def set_variables(names: Sequence[str]) -> list[str]:
    """The variables that are set, in upper or lower case. Their values may hold passwords."""
    return [name for each in names for name in (each, each.lower()) if os.environ.get(name)]


def stage_lines(stage: Stage) -> list[str]:
    time_text = milliseconds(stage.seconds) if stage.state != "not tried" else ""
    line = f"{stage.name:5} {stage.state:9} {time_text:>9}  {stage.got}"
    return [line, f"{'':27}{stage.advice}"] if stage.advice else [line]


def contract_lines(endpoint: str, contract: Contract) -> list[str]:
    lines = ["", f"POST {path_of(endpoint)}"]
    time_text = milliseconds(contract.seconds) if contract.state != "not tried" else ""
    best = "" if contract.best_score is None else f", best score {contract.best_score:.3g}"
    good = f"{contract.passages} passages{best}, took_ms {contract.took_ms:.3g}" if contract.state == "ok" else ""
    lines.append(f"  contract  {contract.state:9} {time_text:>9}  {good}".rstrip())
    lines += [f"    - {fault}" for fault in contract.faults[:MAX_FAULTS_SHOWN]]
    if len(contract.faults) > MAX_FAULTS_SHOWN:
        lines.append(f"    - and {len(contract.faults) - MAX_FAULTS_SHOWN} more; --json shows them")
    if contract.retry_after:
        lines.append(f"    Retry-After: {contract.retry_after}")
    if contract.state == "ok":
        returned = " and ".join(contract.id_returned)
        lines.append(f"  id        {f'returned in the {returned}' if returned else NO_ID}")
    lines += [f"    {line}" for line in contract.found or ()]
    return [*lines, f"    answer: {contract.answer}"] if contract.answer is not None else lines


def latency_lines(latency: Latency) -> list[str]:
    if latency.state == "not tried":
        return [f"  latency   not tried            {latency.reason}"]
    lines = [
        f"  latency   {latency.state:9} {milliseconds(latency.elapsed_s):>9}  {latency.requests} requests, "
        f"{latency.concurrency} at once, {latency.connections} connections: {latency.requests_per_s:,.1f} requests/s",
        f"    outcomes: {', '.join(f'{name} x {count}' for name, count in latency.outcomes.items())}",
    ]
    for name, figures in {"wall": latency.wall_ms, "service's own took_ms": latency.took_ms}.items():
        if figures:
            lines.append(f"    {name}: {', '.join(f'{each} {value:,.1f} ms' for each, value in figures.items())}")
    lines += [f"    Retry-After with {status}: {'; '.join(seen)}" for status, seen in latency.retry_after.items()]
    return lines


def verdict_lines(verdict: Verdict) -> list[str]:
    settings = {"rag_max_concurrency": verdict.rag_max_concurrency, "rag_timeout_s": verdict.rag_timeout_s}
    suggested = ", ".join(f"{name}: {value}" for name, value in settings.items() if value is not None)
    state = "ready" if verdict.ready else f"NOT READY: {'; '.join(verdict.reasons)}"
    lines = ["", f"Verdict: {state}."]
    lines += [f"  suggested: {suggested}"] if suggested else []
    return [*lines, *(f"  {rule}" for rule in verdict.rules)]


# The command.


def main(arguments: Sequence[str] | None = None) -> int:
    """Check everything, print it, and return the exit code."""
    options = parsed(arguments)
    target: Target = options.base_url
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a terminal may not know Chinese

    def write(lines: Sequence[str]) -> None:
        if not options.json:
            print("\n".join(lines), flush=True)

    write(head_lines(target))
    stages = []
    for stage in diagnose(target, options.timeout):
        stages.append(stage)
        write(stage_lines(stage))
    results = {}
    for endpoint in ["8b"] if options.quick else [options.only] if options.only else ENDPOINTS:
        results[endpoint] = look_at(target, endpoint, options, write)
    verdict = judge(stages, results, options.timeout)
    write(verdict_lines(verdict))
    if options.json:
        print(json.dumps(report(target, options, stages, results, verdict), indent=2))
    return EXIT_OK if verdict.ready else EXIT_NOT_READY


def look_at(
    target: Target, endpoint: str, options: argparse.Namespace, write: Callable[[Sequence[str]], None]
) -> tuple[Contract, Latency]:
    """Check one endpoint's contract, and measure its latency if that can show something."""
    contract, latency = Contract(), Latency(reason="there is no connection")
    if target.speaks_http:
        contract = check_contract(target, endpoint, options)
        latency.reason = f"{contract.outcome} would come again; mend it first"
    write(contract_lines(endpoint, contract))
    # a repetition of certain failures has the same result, and takes time
    status = int(contract.outcome) if contract.outcome.isdigit() else 0
    is_worth_it = contract.outcome == "bad body" or status == 200 or status in RETRYABLE_STATUSES or status >= 500
    if options.quick:
        latency.reason = "--quick asks one question"
    elif target.speaks_http and is_worth_it:
        latency = measure(target, endpoint, options)
    write(latency_lines(latency))
    return contract, latency


def report(
    target: Target,
    options: argparse.Namespace,
    stages: Sequence[Stage],
    results: dict[str, tuple[Contract, Latency]],
    verdict: Verdict,
) -> dict[str, Any]:
    """The object for --json."""
    names = ("concurrency", "requests", "timeout", "top_k", "score_threshold")
    return {
        "base_url": target.url,
        "key_env": target.key_env,
        "settings": {name: getattr(options, name) for name in names},
        "variables_not_used": set_variables(PROXY_VARIABLES),
        "stages": [asdict(stage) for stage in stages],
        "endpoints": {
            endpoint: {"contract": asdict(contract), "latency": asdict(latency)}
            for endpoint, (contract, latency) in results.items()
        },
        "verdict": asdict(verdict),
    }


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--base-url", type=target_of, required=True, help="the service's address before /v1/rag")
    parser.add_argument("--key-env", help="environment variable that holds the key")
    parser.add_argument("--concurrency", type=number(int, 1, MAX_CONCURRENCY), default=8, help="requests at once")
    parser.add_argument("--requests", type=number(int, 1, 100_000), default=40, help="requests per endpoint")
    parser.add_argument("--timeout", type=number(float, 0.1, 3600), default=30.0, help="seconds for one request")
    parser.add_argument("--top-k", type=number(int, 1, 50), default=3, help="most passages in an answer")
    parser.add_argument("--score-threshold", type=number(float, 0, 1), default=0.03, help="lowest score of a passage")
    parser.add_argument("--only", choices=ENDPOINTS, help="check only this endpoint")
    parser.add_argument("--quick", action="store_true", help="ask 8b one question, and print passages and answer")
    parser.add_argument("--query", help="the customer's question, in place of the tool's own ones")
    parser.add_argument("--profile", help="the customer's profile, in place of the tool's own ones")
    parser.add_argument("--summary", help="what was said before, in place of the tool's own ones")
    parser.add_argument("--context", help="the conversation; default: the question, asked by the customer")
    parser.add_argument("--show-answers", action="store_true", help="print the texts of answers too")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options = parser.parse_args(arguments)
    if options.key_env is not None:
        key = os.environ.get(options.key_env, "")
        if not key or not all("!" <= each <= "~" for each in key):
            state = "holds a character that no header can carry, such as a line's end" if key else "is not set"
            # Its name is not shown: some people give the key itself here.
            parser.error(f"--key-env: the variable {state}, expected the name of one that holds the key; export it")
        options.base_url.key, options.base_url.key_env = key, options.key_env
    return options


def target_of(text: str) -> Target:
    """The target of a base URL. The message of a refused one does not show it: it may hold a password."""
    expected = "expected an address such as https://rag.example.com:8443"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise argparse.ArgumentTypeError(f"got an address that cannot be read, {expected}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError(f"got no address that starts with http:// or https://, {expected}")
    if parts.username is not None or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"got an address with a user, a query or a fragment, {expected}")
    path = parts.path.rstrip("/")
    if "/v1/rag" in path or not path.isascii():
        raise argparse.ArgumentTypeError(f"got an address with an endpoint's path, {expected} (before /v1/rag)")
    url = f"{parts.scheme}://{parts.netloc}{path}"
    return Target(url, parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), path)


def number(kind: type, low: float, high: float) -> Callable[[str], Any]:
    """A check for an option that takes a number from `low` to `high`."""

    def check(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            noun = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {noun} from {low:g} to {high:g}")
        return value

    return check


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except OSError as error:  # of stdout: those of connections are findings
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python's last flush fails again
        print(f"the output can't be written ({error.strerror})", file=sys.stderr)
        code = EXIT_USAGE
    sys.exit(code)
