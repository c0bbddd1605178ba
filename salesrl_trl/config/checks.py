"""What the modules of settings share: help texts, and checks that say what was got and what was expected."""

import json
import urllib.parse
from typing import Any

from salesrl_trl.errors import ConfigError


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


def check_url(setting: str, url: str | None) -> None:
    if url is None:
        return
    check(
        "@" not in urllib.parse.urlsplit(url).netloc,
        f"`{setting}` holds credentials. Expected an address without them: logs and errors name it. Keys go into an "
        "environment variable.",
    )
    check(
        url.startswith(("http://", "https://")),
        f"`{setting}` is {url!r}. Expected an address that starts with http:// or https://.",
    )


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
