"""What is looked at before any model is loaded.

Owns the checks that need the outside world: is there a model at that path, does that address answer. Settings by
themselves are checked in `config`, rows in `data`.
"""

import os
import ssl
from pathlib import Path

import httpx2
from transformers import AutoConfig

from salesrl_trl.errors import ConfigError, ModelNotFoundError, ServiceRejected, ServiceUnavailable

PROBE_TIMEOUT_S = 10.0
"""Long enough for a cold load balancer, short enough to sit through."""


def check_model(name_or_path: str, revision: str | None, trust_remote_code: bool) -> None:
    """Raise `ModelNotFoundError` unless a model's configuration is there, locally or on the hub."""
    path = Path(name_or_path).expanduser()
    looks_local = name_or_path.startswith(("/", ".", "~")) or path.is_dir() or name_or_path.count("/") > 1
    if looks_local and not (path / "config.json").is_file():
        found = "a folder without config.json" if path.is_dir() else "nothing"
        raise ModelNotFoundError(
            f"`model_name_or_path` is {name_or_path!r}, where there is {found}. Expected a folder that "
            "`save_pretrained` wrote, or the name of a model on the hub. Correct the path, or leave it out to train "
            "the small demo policy."
        )
    try:
        AutoConfig.from_pretrained(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"`model_name_or_path` is {name_or_path!r}, whose configuration could not be loaded "
            f"({type(error).__name__}). Expected a folder with config.json, or the name of a model on a hub that this "
            "machine can reach. Correct it, log in if the model is gated, or leave it out to train the small demo "
            "policy."
        ) from error


def read_key(variable: str | None, setting: str) -> str | None:
    """The key in an environment variable; `None` where none is configured.

    Raises:
        `ConfigError`: the variable is named but not set. The message names it; a key never stands in a message.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(
            f"`{setting}` names the environment variable {variable}, which is not set. Expected it to hold the key. "
            f"Export it before the launch, or leave `{setting}` out."
        )
    return key


def check_rag(base_url: str, key: str | None) -> None:
    """Raise unless something answers at the RAG service's address. Its `/healthz` may be missing."""
    _probe(f"{base_url.rstrip('/')}/healthz", key, "RAG service", "rag_base_url")


def check_judge(base_url: str, key: str | None, setting: str = "judge_base_url") -> None:
    """Raise unless something answers at the judge's address. Its `/models` may be missing."""
    _probe(f"{base_url.rstrip('/')}/models", key, "judge", setting)


def _probe(url: str, key: str | None, service: str, setting: str) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx2.get(
            url,
            headers=headers,
            timeout=PROBE_TIMEOUT_S,
            trust_env=False,  # no proxies; which certificates are trusted is as in training
            verify=ssl.create_default_context(),
        )
    except httpx2.HTTPError as error:
        raise ServiceUnavailable(
            f"the {service} does not answer at `{setting}`: GET {url} ended in {type(error).__name__}. Expected an "
            f"HTTP answer within {PROBE_TIMEOUT_S:g} s. Start the service, correct the address, or leave `{setting}` "
            "out to use the embedded one."
        ) from None
    if response.status_code in (401, 403):
        raise ServiceRejected(
            f"the {service} at `{setting}` refused the key: GET {url} answered {response.status_code}. Expected the "
            f"key in the variable named by `{setting.removesuffix('_base_url')}_api_key_env`. Check that variable."
        )
    if response.status_code >= 500:
        raise ServiceUnavailable(
            f"the {service} at `{setting}` is not healthy: GET {url} answered {response.status_code}. Expected 200. "
            "Look at the service's own log."
        )
