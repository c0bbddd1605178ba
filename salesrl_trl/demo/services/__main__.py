"""Runs the RAG service and the judge in one process, as a command:

python -m salesrl_trl.demo.services --rag-port 8801 --judge-port 8802
"""

import argparse
import asyncio
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from salesrl_trl.ground.process import NO_ACCELERATOR

if __name__ == "__main__":
    os.environ |= NO_ACCELERATOR  # also where it is started by hand; before imports that may bring JAX

import uvicorn
from starlette.types import ASGIApp

from salesrl_trl.data.files import demo_path, load_documents
from salesrl_trl.demo.services.launcher import ServiceAddresses
from salesrl_trl.demo.services.rubric import protected_terms
from salesrl_trl.demo.services.services_app import KnowledgeIndex, create_app, judge_service, rag_service
from salesrl_trl.errors import ConfigError, SalesRLError
from salesrl_trl.ground.command_line import parser_of
from salesrl_trl.ground.shutdown import EXIT_BAD_INPUT

DRAIN_TIMEOUT_S = 3  # seconds for requests in flight when the services stop. An answer of their own takes less.
PARENT_POLL_S = 1.0
"""Seconds between two checks that the parent is alive. Another process may hold stdin open after the parent's end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both services until a signal or the end of the parent stops them. Returns the exit code."""
    options = parser_of("demo.services").parse_args(arguments, argparse.Namespace(parent=os.getppid()))
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        index = KnowledgeIndex(load_documents(options.documents or demo_path("knowledge.jsonl")))
        app = create_app(rag_service(index), judge_service(protected_terms()))
        with _listen(options.host, options.rag_port) as rag, _listen(options.host, options.judge_port) as judge:
            asyncio.run(_Server(app, options).serve([rag, judge]))
    except SalesRLError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_INPUT
    return 0


def _listen(host: str, port: int) -> socket.socket:
    try:
        listener = socket.create_server((host, port))
        # Connections inherit this. asyncio sets it only on sockets that name their protocol, and this one does not.
        # Without it each answer waits 40 ms, until the client acknowledges the headers.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:  # the latter for no port at all
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]  # the address comes again
        raise ConfigError(
            f"cannot listen on {host} port {port} ({reason}); "
            "give another with --host, --rag-port or --judge-port (0 takes any free port)"
        ) from error


class _Server(uvicorn.Server):
    """Prints the addresses once it listens on them, in the order of the sockets, and stops by `stop`."""

    def __init__(self, app: ASGIApp, options: argparse.Namespace) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,  # uvicorn's default writes to stdout
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=DRAIN_TIMEOUT_S,
            )
        )
        self._options = options

    def stop(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        if self._options.exit_with_parent:  # before the addresses: the parent may end as soon as it reads them
            _watch_parent(self._options.parent, lambda: loop.call_soon_threadsafe(self.stop))
        await super().startup(sockets)
        rag_url, judge_url = (f"http://{self._options.host}:{listener.getsockname()[1]}" for listener in sockets or ())
        addresses = ServiceAddresses(rag_base_url=rag_url, judge_base_url=f"{judge_url}/v1")
        sys.stdout.write(json.dumps(asdict(addresses)) + "\n")
        sys.stdout.flush()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own raises a signal again after a clean stop."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)
        yield


def _watch_parent(parent: int, stop: Callable[[], object]) -> None:
    """Call `stop` once stdin is closed or the parent is another process than `parent`."""

    def watch() -> None:
        while os.getppid() == parent:
            readable, _, _ = select.select([0], [], [], PARENT_POLL_S)
            if readable and not os.read(0, 4096):
                break
        stop()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
