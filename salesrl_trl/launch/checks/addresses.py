"""Checks of configured addresses, by requests that cost a service nothing: does the expected service answer there?

`checks.reward` asks RAG services and judges before every run, `launch.plan` asks a vLLM server.
"""

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from salesrl_trl.errors import (
    ConfigError,
    ServiceError,
    ServiceRejected,
    ServiceTimeout,
    ServiceUnavailable,
    nearest,
)
from salesrl_trl.service.http import HttpClient, read_json, refuse_stated_error
from salesrl_trl.service.statuses import UNKNOWN_MODEL

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 10.0  # seconds for a whole answer: enough for a cold load balancer, few for a user to wait
SERVER_POLL_S = 1.0  # seconds between two requests to a vLLM server that is still starting
SHOWN_MODELS = 8  # names of models that a message shows
MEANINGLESS = "THE SCORES MEAN NOTHING"  # part of each line about stand-ins that score what they do not know
STAND_IN_OWNER = "salesrl_trl"  # `owned_by` of the embedded judge's model, in its list of models


def check_rag(base_url: str, key: str | None) -> list[str]:
    """Check that a service answers at the RAG service's address. Its `/healthz` may be missing.

    Returns lines for the banner, about what could not be checked.
    """
    if _probe(base_url, "/healthz", key, "RAG service", "rag.base_url") is not None:
        return []
    shorter = re.sub(r"/v1(/.*)?$", "", base_url.rstrip("/"))
    if shorter != base_url.rstrip("/") and isinstance(_ask(shorter, "/healthz", key, "RAG service"), bytes):
        raise ConfigError(
            f"`rag.base_url` is {base_url}, but the service answers at {shorter}. Expected the address before "
            f"`/v1/rag/...`. Set `rag.base_url: {shorter}`."
        )
    return [f"the RAG service at {base_url} has no /healthz: the first call will show whether it is a RAG service"]


def check_models(
    base_url: str, key: str | None, model: str, *, setting: str = "judge_providers.base_url"
) -> list[str]:
    """Check that an OpenAI-compatible judge answers, and has the model: where its list of models lacks the name or
    can't be had, by one request of one token. `setting` holds the address. Returns what `check_rag` does."""
    question = {"model": model, "messages": [{"role": "user", "content": "Say OK."}], "max_tokens": 1}
    try:
        body = _probe(base_url, "/models", key, "judge", setting)
    except ServiceError:  # some keys may ask models, and not list them
        if isinstance(_ask(base_url, "/chat/completions", key, "judge", question), bytes):
            return []
        raise
    known = _model_names(body)
    if known is None:
        base, query = base_url.partition("?")[0].rstrip("/"), base_url.partition("?")[2]
        # with a missing `/v1` added, or with surplus parts removed
        for other in (f"{base}/v1", re.sub(r"(/v1)+(/chat/completions|/models|/v1)$", "/v1", base)):
            answer = None if other == base or query else _ask(other, "/models", key, "judge")
            if isinstance(answer, bytes) and _model_names(answer) is not None:
                raise ConfigError(
                    f"`{setting}` is {base_url}, where there is no list of models, but there is one at {other}. "
                    f"Expected the address before `/models`. Set `{setting}: {other}`."
                )
    if known != [] and model not in (known or ()):
        answer = _ask(base_url, "/chat/completions", key, "judge", question)
        if isinstance(answer, ServiceRejected) and (answer.status == 404 or UNKNOWN_MODEL in answer.marks):
            names = known or ()
            more = f" and {len(names) - SHOWN_MODELS} more" if len(names) > SHOWN_MODELS else ""
            listed = f" It lists {', '.join(names[:SHOWN_MODELS])}{more}." if names else ""
            raise ConfigError(
                f"`{setting.removesuffix('base_url')}model` is {model!r}, to which POST {base_url}/chat/completions "
                f"answered {answer.status}.{nearest(model, names)}{listed} Expected an OpenAI-compatible address, and "
                "a model that answers there. Correct the name or the address. An API of another form, such as "
                "Anthropic's, goes through a proxy (LiteLLM, OpenRouter)."
            )
        if isinstance(answer, ServiceError) and answer.status in (401, 403):
            raise _key_refused("judge", setting, f"POST {base_url}/chat/completions", answer)
        if isinstance(answer, ServiceError) and (answer.status is None or answer.status >= 500):
            return [f"the judge at {base_url} gave no answer as {model!r}: {answer}"]
    if f'"{STAND_IN_OWNER}"'.encode() not in (body or b""):
        return []
    return [
        f"the judge at {base_url} is the demo's stand-in, a program that reads no rubric: for other rubrics or "
        f"rows than the demo's {MEANINGLESS}"
    ]


def check_vllm_server(base_url: str, patience_s: float) -> int | None:
    """Wait until a vLLM server answers, as TRL's client will. Returns the longest prompt and completion together that
    it accepts, in tokens; `None` if it does not say."""
    ends = time.monotonic() + patience_s
    while not isinstance(answer := _ask(base_url, "/health", None, "vLLM server"), bytes):
        if time.monotonic() >= ends:
            raise ServiceUnavailable(
                f"there is no vLLM server at {base_url} (GET {base_url}/health: {answer}), after {patience_s:g} s. "
                "Expected the server that `vllm_mode: server` names. Start it, or correct `vllm_server_base_url`, or "
                "`vllm_server_host` and `vllm_server_port`."
            )
        if time.monotonic() + patience_s - SERVER_POLL_S < ends:  # the first time
            logger.info(f"waiting up to {patience_s:g} s (`vllm_server_timeout`) for the vLLM server at {base_url}")
        time.sleep(min(SERVER_POLL_S, max(ends - time.monotonic(), 0)))
    info = _ask(base_url, "/server_info", None, "vLLM server")
    if isinstance(info, ServiceError) and info.status == 404:
        raise ConfigError(
            f"the vLLM server at {base_url} has no /server_info. Expected it: the weights' update needs it. Start the "
            "server with VLLM_SERVER_DEV_MODE=1 in its environment."
        )
    models = _ask(base_url, "/v1/models", None, "vLLM server")
    try:
        room = json.loads(models)["data"][0]["max_model_len"] if isinstance(models, bytes) else None
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
    return room if isinstance(room, int) else None


def _model_names(body: bytes | None) -> Sequence[str] | None:
    """Names of the models in an OpenAI-compatible list; `None` if the body holds no such list."""
    try:
        return [str(model["id"]) for model in json.loads(body or b"")["data"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _probe(base_url: str, path: str, key: str | None, service: str, setting: str) -> bytes | None:
    """The body of a 200 to GET `path`, within `PROBE_TIMEOUT_S`; `None` if the service has nothing at that path."""
    asked = f"GET {base_url.rstrip('/')}{path}"
    answer = _ask(base_url, path, key, service)
    if isinstance(answer, bytes):
        return answer
    if answer.status in (401, 403):
        raise _key_refused(service, setting, asked, answer)
    if answer.status is None or answer.status >= 500:
        embedded = ""
        if setting in ("rag.base_url", "judge_providers.base_url"):
            embedded = f", or, with the demo's rows and rubrics, leave `{setting}` out to use the embedded one"
        raise ServiceUnavailable(
            f"the {service} does not answer at `{setting}` as it should ({asked}): {answer}. Expected 200 within "
            f"{PROBE_TIMEOUT_S:g} s. Start the service, look at its own log, or correct the address{embedded}."
        )
    return None


def _key_refused(service: str, setting: str, asked: str, answer: ServiceError) -> ServiceRejected:
    is_other = isinstance(answer, ServiceRejected) and "error" in answer.marks  # `type` of Anthropic's own errors
    other = " Its errors are of Anthropic's own API, which goes through a proxy (LiteLLM, OpenRouter)." * is_other
    return ServiceRejected(
        f"the {service} at `{setting}` refused the key: {asked} answered {answer.status}. Expected the key in the "
        f"variable named by `{setting.removesuffix('base_url')}api_key_env`. Check that variable.{other}"
    )


def _ask(
    base_url: str, path: str, key: str | None, service: str, body: Mapping[str, object] | None = None
) -> bytes | ServiceError:
    """GET, or POST a body, in this thread, where Ctrl-C ends it at once. In a notebook, whose thread runs an
    event loop, in another."""

    def read(content: bytes) -> bytes:
        with contextlib.suppress(ValueError):
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
        return thread.submit(lambda: asyncio.run(get())).result()
