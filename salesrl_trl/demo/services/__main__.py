"""Command that runs the RAG service and the judge in one process:

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from salesrl_trl.ground.process import NO_ACCELERATOR

if __name__ == "__main__":
    os.environ |= NO_ACCELERATOR  # even when started by hand; before imports that may load JAX

import uvicorn
from starlette.types import ASGIApp

from salesrl_trl.data.files import demo_path, load_documents
from salesrl_trl.demo.services.launcher import ServiceAddresses
from salesrl_trl.demo.services.rubric import protected_terms
from salesrl_trl.demo.services.services_app import KnowledgeIndex, create_app
from salesrl_trl.errors import ConfigError, SalesRLError
from salesrl_trl.ground.command_line import parser_of
from salesrl_trl.ground.shutdown import EXIT_BAD_INPUT

DRAIN_TIMEOUT_S = 3  # seconds for pending requests when the services stop; answers need less


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both services until a signal or the parent's end. Returns the exit code."""
    options = parser_of("demo.services").parse_args(arguments, argparse.Namespace(parent=os.getppid()))
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        index = KnowledgeIndex(load_documents(options.documents or demo_path("knowledge.jsonl")))
        app = create_app(index, protected_terms())
        with _listen(options.host, options.rag_port) as rag, _listen(options.host, options.judge_port) as judge:
            asyncio.run(_Server(app, options).serve([rag, judge]))
    except SalesRLError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_INPUT
    return 0


def _listen(host: str, port: int) -> socket.socket:
    try:
        listener = socket.create_server((host, port))
        # inherited by connections; asyncio only sets it on sockets with an explicit protocol
        # without it, each answer waits 40 ms for the client to acknowledge the headers
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:  # `OverflowError`: invalid port
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]  # omit the repeated address
        raise ConfigError(
            f"cannot listen on {host} port {port} ({reason}); "
            "choose another with --host, --rag-port or --judge-port (0 selects a free port)"
        ) from error


class _Server(uvicorn.Server):
    """Prints the addresses, in socket order, once it listens."""

    def __init__(self, app: ASGIApp, options: argparse.Namespace) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,  # uvicorn's default logs to stdout
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=DRAIN_TIMEOUT_S,
            )
        )
        self._options = options

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        rag_url, judge_url = (f"http://{self._options.host}:{listener.getsockname()[1]}" for listener in sockets or ())
        addresses = ServiceAddresses(rag_base_url=rag_url, judge_base_url=f"{judge_url}/v1")
        sys.stdout.write(json.dumps(asdict(addresses)) + "\n")
        sys.stdout.flush()

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second; returns whether to stop."""
        return await super().on_tick(counter) or (self._options.exit_with_parent and self._has_lost_parent())

    def _has_lost_parent(self) -> bool:
        """Whether stdin is closed or the parent changed; another process may keep stdin open after the parent ends."""
        readable, _, _ = select.select([0], [], [], 0)
        return os.getppid() != self._options.parent or bool(readable and not os.read(0, 4096))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's, which re-raises a signal after a clean stop."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.handle_exit, number, None)
        yield


if __name__ == "__main__":
    sys.exit(main())
