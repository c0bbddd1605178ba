"""vLLM's own server in a process of its own, for benches and tests."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_TIMEOUT_S = 300.0
PR_SET_PDEATHSIG = 1


@contextmanager
def held_port() -> Iterator[int]:
    """A free port. It stays bound during the block: only a server that is told its number and sets `SO_REUSEADDR`, as
    vLLM, uvicorn and torch do, can listen on it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


@contextmanager
def vllm_server(model: Path, log: Path, *options: str, **environment: str) -> Iterator[str]:
    """A server of the model in `model`. Yields its address, without `/v1`. The server ends with the block.

    Args:
        model (`Path`):
            Folder of weights and tokenizer.
        log (`Path`):
            File for the server's output.
        options (`str`):
            More words for the server's command line.
        environment (`str`):
            More variables for the server's environment.

    Raises:
        `RuntimeError`: the server ended, or was not ready in 300 s. The message holds the end of its output.
    """
    variables = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", **environment}
    with held_port() as port, log.open("wb") as out:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), *options]
        server = subprocess.Popen(
            command, stdout=out, stderr=out, env=variables, start_new_session=True, preexec_fn=_end_with_parent
        )
        try:
            _await_health(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(60)


def _end_with_parent() -> None:
    """This process gets a SIGTERM when its parent is gone, killed too (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _await_health(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"vLLM's server did not start: {log.read_text(errors='replace')[-4000:]}")


def for_training(max_model_len: int) -> tuple[str, ...]:
    """Options with which the server takes a trainer's weights and returns the log-probs that the trainer needs."""
    return (
        "--weight-transfer-config", '{"backend": "nccl"}', "--logprobs-mode", "processed_logprobs",
        "--max-logprobs", "-1", "--max-model-len", str(max_model_len),
    )  # fmt: skip
