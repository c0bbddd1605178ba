"""The viewer's read-only server on loopback.

A request must name a loopback host, so that other sites can't read completions by DNS rebinding. It must also contain
the address's key, which other users of the machine don't know.
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
    """Serves an index. Port 0 selects a free port."""

    daemon_threads = True
    request_queue_size = 128
    """Length of the accept queue: a page sends many requests at once, and Python's default is 5."""

    def __init__(self, index: Index, port: int = 0) -> None:
        self.index = index
        self.key = secrets.token_urlsafe(12)
        super().__init__((HOST, port), _Handler)
        self.url = f"http://{HOST}:{self.server_port}/{self.key}/"


class _Handler(BaseHTTPRequestHandler):
    server: Viewer
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds before an idle connection closes
    disable_nagle_algorithm = True  # it delays a body by 40 ms until its headers are acknowledged

    def handle(self) -> None:
        with suppress(ConnectionError):  # the browser disconnected
            super().handle()

    def do_GET(self) -> None:
        answer: object
        try:
            path, query = self._asked()
            params = dict(parse_qsl(query, max_num_fields=40))
            answer, status = QUESTIONS[path](self.server.index, params) if path else page(), HTTPStatus.OK
        except PermissionError:
            answer, status = {"error": "the Host of a request must be loopback"}, HTTPStatus.FORBIDDEN
        except KeyError:
            answer, status = {"error": "not found: the address must contain its key"}, HTTPStatus.NOT_FOUND
        except ValueError as error:
            answer, status = {"error": str(error)}, HTTPStatus.BAD_REQUEST
        except Exception as error:  # shown on the page
            answer, status = {"error": f"{type(error).__name__}: {error}"}, HTTPStatus.INTERNAL_SERVER_ERROR
        self._send(status, answer)

    def _asked(self) -> tuple[str, str]:
        """The path below the key, and the query. Raises `PermissionError` for a wrong host, `KeyError` for a wrong
        key."""
        hosts = self.headers.get_all("Host") or []
        try:
            is_loopback = len(hosts) == 1 and urlsplit(f"//{hosts[0]}").hostname in LOOPBACK
        except ValueError:
            is_loopback = False
        if not is_loopback:
            raise PermissionError
        address, _, query = self.path.partition("?")
        key, _, path = address.lstrip("/").partition("/")
        if not secrets.compare_digest(key.encode(), self.server.key.encode()):
            raise KeyError(address)
        return path, query

    def _send(self, status: HTTPStatus, content: object) -> None:
        """Send a page or a JSON value. Pages also contain their own policy."""
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
        """Log nothing: addresses contain the key and search terms."""
