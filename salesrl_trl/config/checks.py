"""What the modules of settings share: help texts, and checks that say what was got and what was expected."""

import dataclasses
import json
import math
import re
import urllib.parse
from typing import Any

from salesrl_trl.errors import ConfigError
from salesrl_trl.reward.service.http import address_fault


def about(text: str) -> dict[str, str]:
    return {"help": text}


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def check_choice(config: Any, name: str, choices: Any) -> None:
    value = getattr(config, name)
    check(value in choices, f"`{name}` is {value!r}. Expected one of: {', '.join(choices)}.")


def check_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        check(value > 0, f"`{name}` is {value}. Expected more than 0.")


def check_finite(config: Any, where: str = "") -> None:
    """No infinite number, and none that is none: neither is a limit, a price or a reward."""
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        check(
            not isinstance(value, float) or math.isfinite(value),
            f"`{where}{each.name}` is {value}. Expected a finite number.",
        )


def check_url(setting: str, url: str | None) -> None:
    if url is None:
        return
    fault = address_fault(url)
    check(fault is None, f"`{setting}` holds {fault}.")
    check(
        re.fullmatch(r"https?://\S+", url) is not None and _has_host(url),
        f"`{setting}` is {url!r}. Expected an address that starts with http:// or https://, a host behind it.",
    )


def _has_host(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # no port that is a number, or half of an IPv6 address
        return False


def structure(setting: str, value: Any, kind: type) -> Any:
    """A setting that is a structure in YAML and its JSON on the command line."""
    expected = "a mapping" if kind is dict else "a list"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"`{setting}` is not JSON (column {error.colno}). Expected {expected}, in YAML or as JSON."
            ) from None
    check(isinstance(value, kind), f"`{setting}` is a {type(value).__name__}. Expected {expected}.")
    return value
