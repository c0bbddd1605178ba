"""vLLM's own server for benches and tests, and completions of fixed lengths from it."""

import itertools
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 300.0


@contextmanager
def vllm_server(model: Path, log: Path, *options: str, **environment: str) -> Iterator[str]:
    """While active, it serves the model in `model` at the address that this yields, without `/v1`.

    Args:
        model (`Path`):
            Folder of weights and tokenizer.
        log (`Path`):
            File for what it prints.
        options (`str`):
            Further words of its command line.
        environment (`str`):
            Further variables of its environment.

    Raises:
        `RuntimeError`: it ended, or was not ready in 300 s; the message holds the end of what it printed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *options]
    variables = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", **environment}
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=variables, start_new_session=True)
    try:
        _await_health(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


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
    """The words of its command line with which it takes a trainer's weights and gives what the trainer needs."""
    return (
        "--weight-transfer-config", '{"backend": "nccl"}', "--logprobs-mode", "processed_logprobs",
        "--max-logprobs", "-1", "--max-model-len", str(max_model_len),
    )  # fmt: skip


def fix_server_lengths(client: Any, length: Callable[[Sequence[int], int], int]) -> None:
    """Let TRL's client of a server ask for completions of these lengths, each in a request of its own.

    Args:
        client (`VLLMClient`):
            Whose `generation_kwargs` hold a seed, which tells the samples of a prompt apart: this package gives the
            number of the sample by it. The server is not told of it.
        length (`Callable[[Sequence[int], int], int]`):
            Tokens of a prompt's completion, by the prompt's token ids and the number of the sample.
    """
    ask = client.generate

    def fixed(
        prompts: Sequence[list[int]], n: int = 1, generation_kwargs: dict[str, Any] | None = None, **sampling: Any
    ) -> dict[str, Any]:
        further = dict(generation_kwargs or {})
        first = further.pop("seed")

        def one(place: tuple[list[int], int]) -> dict[str, Any]:
            prompt, sample = place
            own = {**sampling, "max_tokens": length(prompt, first + sample)}
            answer: dict[str, Any] = ask([prompt], n=1, generation_kwargs={**further, "ignore_eos": True}, **own)
            return answer

        places = list(itertools.product(prompts, range(n)))
        with ThreadPoolExecutor(len(places)) as pool:
            outputs = list(pool.map(one, places))
        merged = {name: [output[name][0] for output in outputs] for name in outputs[0]}
        return {**merged, "prompt_ids": list(prompts)}

    client.generate = fixed
