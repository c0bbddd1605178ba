"""vLLM's own server with a small model."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

START_TIMEOUT_S = 300.0


@contextlib.contextmanager
def serve(model, log, *options, **environment):
    """While active, it answers at the address that this yields, without `/v1`.

    Args:
        model (`Path`):
            Folder of the model and its tokenizer.
        log (`Path`):
            File for what it prints, which is shown where it fails to start.
        options:
            Further words of its command line.
        environment:
            Further variables of its environment.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--enforce-eager"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-num-seqs", "16", *options]
    variables = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"}
    with log.open("wb") as out:
        server = subprocess.Popen(
            command, stdout=out, stderr=out, env={**variables, **environment}, start_new_session=True
        )
    try:
        _await_health(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def _await_health(url, server, log):
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text(errors="replace")[-4000:]
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(log.read_text(errors="replace")[-4000:])
