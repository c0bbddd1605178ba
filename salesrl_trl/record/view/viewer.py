"""The viewer's server: on loopback, for reading.

A request must name a loopback host, so that no page from elsewhere reads completions by a name of its own that it
points at this machine. It must also have the key of the address, which other users of the machine don't know.
"""

import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from salesrl_trl.record.view import queries
from salesrl_trl.record.view.page import page
from salesrl_trl.record.view.record_index import Index

HOST = "127.0.0.1"
LOOPBACK = (HOST, "localhost", "::1")
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
QUESTIONS: dict[str, Callable[[Index, queries.Params], object]] = {
    "api/state": queries.state,
    "api/list": queries.listing,
    "api/overview": queries.overview,
    "api/completion": queries.completion,
    "api/compare": queries.comparison,
    "api/report": queries.report,
}


class Viewer(ThreadingHTTPServer):
    """Serves an index. Port 0 is a free one."""

    daemon_threads = True
    request_queue_size = 128
    """Connections that wait to be accepted. A page asks for much at once, and Python's own number is 5."""

    def __init__(self, index: Index, port: int = 0) -> None:
        self.index = index
        self.key = secrets.token_urlsafe(12)
        super().__init__((HOST, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.key}/"


class _Handler(BaseHTTPRequestHandler):
    server: Viewer
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds of a silent connection
    disable_nagle_algorithm = True  # with it, a body waits 40 ms until its head is acknowledged

    def handle(self) -> None:
        with suppress(ConnectionError):  # a browser that left before it had its answer
            super().handle()

    def do_GET(self) -> None:
        path, query = self._asked()
        if path is None:
            return
        answer: object
        try:
            params = dict(parse_qsl(query, max_num_fields=40))
            answer, status = QUESTIONS[path](self.server.index, params) if path else page(), HTTPStatus.OK
        except KeyError:
            answer, status = {"error": "nothing is here"}, HTTPStatus.NOT_FOUND
        except ValueError as error:
            answer, status = {"error": str(error)}, HTTPStatus.BAD_REQUEST
        except Exception as error:  # whatever it is, the page says so
            answer, status = {"error": f"{type(error).__name__}: {error}"}, HTTPStatus.INTERNAL_SERVER_ERROR
        self._send(status, answer)

    def _asked(self) -> tuple[str | None, str]:
        """Path below the key, and query. `None` for a path that has been refused."""
        hosts = self.headers.get_all("Host") or []
        try:
            is_loopback = len(hosts) == 1 and urlsplit(f"//{hosts[0]}").hostname in LOOPBACK
        except ValueError:
            is_loopback = False
        if not is_loopback:
            self._send(HTTPStatus.FORBIDDEN, {"error": "the Host of a request must be loopback"})
            return None, ""
        address, _, query = self.path.partition("?")
        key, _, path = address.lstrip("/").partition("/")
        if not secrets.compare_digest(key.encode(), self.server.key.encode()):
            self._send(HTTPStatus.NOT_FOUND, {"error": "nothing is here: the address has a key in it"})
            return None, ""
        return path, query

    def _send(self, status: HTTPStatus, content: object) -> None:
        """Send a page or a JSON value. A page has a policy of its own beside that of its head."""
        is_page = isinstance(content, str)
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        body = text.encode(errors="replace")
        self.send_response(status)
        headers = {
            "Content-Type": "text/html; charset=utf-8" if is_page else "application/json; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": "frame-ancestors 'none'" if is_page else "default-src 'none'",
        }
        for name, value in {**headers, **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing: addresses have a key and words that somebody looked for."""
