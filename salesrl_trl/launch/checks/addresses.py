"""Checks whether the expected service answers at a configured address, by requests that cost nothing."""

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from salesrl_trl.errors import (
    ConfigError,
    ServiceError,
    ServiceRejected,
    ServiceTimeout,
    ServiceUnavailable,
    nearest,
)
from salesrl_trl.service.error_bodies import UNKNOWN_MODEL
from salesrl_trl.service.http import HttpClient, read_json, refuse_stated_error

logger = logging.getLogger(__name__)

DENIED = (401, 403)  # statuses for a rejected key
PROBE_TIMEOUT_S = 10.0  # for a complete answer: enough for a cold load balancer, bearable for a user
SERVER_POLL_S = 1.0  # interval between requests to a starting vLLM server


def check_rag(base_url: str, key: str | None) -> list[str]:
    """Check that a service answers at the RAG service's address; `/healthz` is optional.

    Returns lines for the banner about what could not be checked.
    """
    answer = _ask(base_url, "/healthz", key, "RAG service")
    _refuse_outage(answer, "RAG service", "rag.base_url", base_url)
    if isinstance(answer, bytes):
        return []
    return [f"the RAG service at {base_url} lacks /healthz; the first call will show whether it is a RAG service"]


def check_models(
    base_url: str, key: str | None, model: str, setting: str = "judge_providers.base_url", who: str = "judge"
) -> list[str]:
    """Check that an OpenAI-compatible judge or partner (`who`) answers and serves the model: by its list of models, or
    if the list fails or lacks the name, by a request for one token. `setting` holds the address. Returns lines as
    `check_rag` does."""
    listed = _ask(base_url, "/models", key, who)
    names: list[str] = []
    if isinstance(listed, bytes):
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            names = [str(each["id"]) for each in json.loads(listed)["data"]]
            if not names or model in names:
                return []
    elif listed.status not in DENIED:  # some keys may not list models
        _refuse_outage(listed, who, setting, base_url)
    question = {"model": model, "messages": [{"role": "user", "content": "Say OK."}], "max_tokens": 1}
    answer = _ask(base_url, "/chat/completions", key, who, question)
    if isinstance(answer, bytes):
        return []
    for denied in (listed, answer):
        if isinstance(denied, ServiceError) and denied.status in DENIED:
            _refuse_outage(denied, who, setting, base_url)
    if isinstance(answer, ServiceRejected) and (answer.status == 404 or UNKNOWN_MODEL in answer.marks):
        known = f" It lists {', '.join(names[:8])}." if names else ""
        found = f"POST {base_url}/chat/completions returned {answer.status}.{nearest(model, names)}{known}"
        remedy = "Correct the name, or the address (the part of an OpenAI-compatible URL before `/chat/completions`)."
        raise ConfigError(f"`{setting.removesuffix('base_url')}model` is {model!r}, but {found} {remedy}")
    is_outage = answer.status is None or answer.status >= 500
    return [f"the {who} at {base_url} did not answer as {model!r}: {answer}"] if is_outage else []


def check_vllm_server(base_url: str, patience_s: float) -> int | None:
    """Wait until a vLLM server answers, as TRL's client does. Returns its maximum model length in tokens; `None` if it
    does not report one."""
    ends = time.monotonic() + patience_s
    while not isinstance(answer := _ask(base_url, "/health", None, "vLLM server"), bytes):
        if time.monotonic() >= ends:
            found = f"there is no vLLM server at {base_url} (GET {base_url}/health: {answer}), after {patience_s:g} s"
            remedy = "Start it, or correct `vllm_server_base_url`, `vllm_server_host` or `vllm_server_port`."
            raise ServiceUnavailable(f"{found}. {remedy}")
        if time.monotonic() + patience_s - SERVER_POLL_S < ends:  # the first time
            logger.info(f"waiting up to {patience_s:g} s (`vllm_server_timeout`) for the vLLM server at {base_url}")
        time.sleep(min(SERVER_POLL_S, max(ends - time.monotonic(), 0)))
    info = _ask(base_url, "/server_info", None, "vLLM server")
    if isinstance(info, ServiceError) and info.status == 404:
        remedy = "Start the server with VLLM_SERVER_DEV_MODE=1 in its environment."
        raise ConfigError(f"the vLLM server at {base_url} lacks /server_info, which weight updates need. {remedy}")
    models = _ask(base_url, "/v1/models", None, "vLLM server")
    with suppress(ValueError, KeyError, TypeError, IndexError, RecursionError):
        room = json.loads(models)["data"][0]["max_model_len"] if isinstance(models, bytes) else None
        return room if isinstance(room, int) else None
    return None


def _refuse_outage(answer: bytes | ServiceError, service: str, setting: str, base_url: str) -> None:
    """Raise if the service rejected the key or is unavailable."""
    if isinstance(answer, bytes):
        return
    if answer.status in DENIED:
        found = f"the {service} at `{setting}` rejected the key: {base_url} returned {answer.status}"
        raise ServiceRejected(f"{found}. Check the variable of `{setting.removesuffix('base_url')}api_key_env`.")
    if answer.status is None or answer.status >= 500:
        found = f"the {service} does not answer at `{setting}` ({base_url}, within {PROBE_TIMEOUT_S:g} s): "
        found += str(answer).rstrip(".")
        remedy = f"Start the service, or correct the address; for the demo's rows, remove `{setting}`."
        raise ServiceUnavailable(f"{found}. {remedy}")


def _ask(
    base_url: str, path: str, key: str | None, service: str, body: Mapping[str, object] | None = None
) -> bytes | ServiceError:
    """GET, or POST a body, in this thread, so that Ctrl-C interrupts it; in another thread if an event loop runs, as
    in a notebook."""

    def read(content: bytes) -> bytes:
        with suppress(ValueError):
            refuse_stated_error(f"the {service}", read_json(content))
        return content

    async def get() -> bytes | ServiceError:
        http = HttpClient(f"the {service}", base_url, api_key=key)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return await (http.get(path) if body is None else http.post(path, body, read))
        except TimeoutError:
            return ServiceTimeout("no complete answer in time")
        except ServiceError as error:
            return error
        finally:
            await http.aclose()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(get())
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, get()).result()
