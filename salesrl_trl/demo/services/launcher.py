"""Starts the RAG service and the judge in a child process. Standard library only: the trainer imports this module and
must not load the services' libraries."""

import importlib.util
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from salesrl_trl.errors import ConfigError, ServiceUnavailable
from salesrl_trl.ground.process import child_environment

TERMINATE_TIMEOUT_S = 6.0  # seconds for a child to stop
STDERR_TAIL_CHARS = 2_000  # length of a failed child's stderr in an error, enough for the end of a traceback
PACKAGES = ("bm25s", "fastapi", "rjieba", "uvicorn")  # the child's dependencies
EMBEDDED_MODEL = "salesrl-judge"
"""Name of the judge's model. Requests for any other one are rejected."""
_COMMAND = ("-P", "-m", "salesrl_trl.demo.services", "--rag-port=0", "--judge-port=0", "--exit-with-parent")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceAddresses:
    """The two services' base URLs."""

    rag_base_url: str  # `"http://127.0.0.1:8801"`, without `/v1`
    judge_base_url: str  # `"http://127.0.0.1:8802/v1"`


class EmbeddedServices:
    """Both services in a child process on free loopback ports; also a context manager. The child stops when this
    process ends, even if it is killed. `arguments` are further command options."""

    def __init__(self, *, documents: Path | None = None, arguments: Sequence[str] = ()) -> None:
        self._arguments = [*arguments] if documents is None else [f"--documents={documents}", *arguments]
        self._child: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._addresses: ServiceAddresses | None = None

    def __enter__(self) -> ServiceAddresses:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def launch(self) -> None:
        """Start the child without waiting, unless it is running."""
        if self._child is not None:
            return
        if absent := [package for package in PACKAGES if importlib.util.find_spec(package) is None]:
            raise ConfigError(
                f"the mock services need {', '.join(absent)}, which the core does not install. Run "
                "`pip install 'salesrl_trl[demo]'`, or configure your own services."
            )
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `stop`; a file, since a full pipe blocks)
        self._child = subprocess.Popen(
            [sys.executable, *_COMMAND, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=child_environment(),
            start_new_session=True,  # Ctrl-C only reaches the parent, which may still need the services
        )

    def start(self, timeout_s: float = 30.0) -> ServiceAddresses:
        """Start the child unless it is running, and wait until both services listen. Raises `ServiceUnavailable` with
        the end of the child's stderr if it exits or exceeds `timeout_s`."""
        if self._addresses is not None:
            return self._addresses
        self.launch()
        try:
            self._addresses = ServiceAddresses(**json.loads(self._first_line(timeout_s)))
        except BaseException:
            self.stop()
            raise
        return self._addresses

    def stop(self) -> None:
        """Stop the child, if any, and wait for it."""
        child, self._child, self._addresses = self._child, None, None
        if child is not None:
            _end(child)
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    def _first_line(self, timeout_s: float) -> bytes:
        assert self._child is not None and self._child.stdout is not None and self._stderr is not None
        watchdog = threading.Timer(timeout_s, self._child.kill)
        watchdog.start()
        try:
            line = self._child.stdout.readline()
        finally:
            watchdog.cancel()
        if line.endswith(b"\n"):
            return line
        _end(self._child)
        self._stderr.seek(0)
        tail = self._stderr.read().decode(errors="replace").strip()[-STDERR_TAIL_CHARS:]
        raise ServiceUnavailable(
            f"the embedded services exited, or did not listen within {timeout_s:g} s; run `python "
            f"-m salesrl_trl.demo.services` by hand to see why. Exit code {self._child.returncode}, end of their "
            f"stderr: {tail or '(empty)'}"
        )


def _end(child: subprocess.Popen[bytes]) -> None:
    with child:  # closes its pipes, and waits
        child.terminate()
        try:
            child.wait(TERMINATE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
