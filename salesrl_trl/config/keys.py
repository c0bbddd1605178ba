"""Names of settings: those of keys, which must not appear in records and logs, and names that are entries of other
settings: dotted ones, e.g. `branch_kl.settings.law`, and those of earlier versions (`former.toml`). Does not need
torch.
"""

import functools
import json
import logging
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import TypeVar

from salesrl_trl.config.checks import structure
from salesrl_trl.errors import ConfigError

logger = logging.getLogger(__name__)

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET = re.compile(
    r"(api|access|auth|bearer|client|private|refresh|secret|session)(keys?|tokens?)|key|token|secrets?|bearer|jwt"
    r"|password|passphrase|passwd|pwd|pass|auth|authorization|credentials?|cookies?"
)
"""The last word of a key's name, possibly with the preceding one."""
_USER = re.compile(r"(?<=//)[^/\s]+@")
"""The part of an address that may contain a password, e.g. of a proxy."""
_IN_A_QUERY = re.compile(r"(?<=[?&;])([^=&;#\s]+)=[^&;#\s]+")
_NO_SECRETS = ("eos_token", "pad_token", "bos_token")


def is_secret(name: str) -> bool:
    """Whether a setting, header or environment variable is a key by its name: `OPENAI_API_KEY_2`, `x-api-key`,
    `accessToken`, but not `max_tokens`."""
    words = [word.lower() for word in _WORD.findall(name)][-2:]
    return name not in _NO_SECRETS and any(map(_SECRET.fullmatch, ["".join(words), *words[-1:]]))


def without_keys(value: object) -> object:
    """A setting's value as plain data, without entries that hold keys, also inside JSON. In addresses, asterisks
    replace user and password, and keys in the query."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {
            str(name): without_keys(entry)
            for name, entry in value.items()
            if not entry or isinstance(entry, bool) or not is_secret(str(name))  # a setting without a value is kept
        }
    if isinstance(value, list | tuple):
        return [without_keys(entry) for entry in value]
    if not isinstance(value, str):
        return value
    if (plain := from_json(value)) is not value:
        shown = without_keys(plain)
        return value if shown == plain else json.dumps(shown)
    return _IN_A_QUERY.sub(lambda pair: f"{pair[1]}=***" if is_secret(pair[1]) else pair[0], _USER.sub("***@", value))


def from_json(value: object) -> object:
    """The parsed value if it is JSON text, else the value."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


Kind = TypeVar("Kind", bound=type)

FORMER: dict[str, str] = tomllib.loads(Path(__file__).with_name("former.toml").read_text("utf-8"))
"""Former name to the setting, with its entry after a dot."""
_TEXTS = {"dataset": "path", "eval_dataset": "path", "rag": "client", "judge_mode": "mode"}  # entries set by a text


def takes_former_names(kind: Kind) -> Kind:
    """Make a settings dataclass accept former names too."""
    made = kind.__init__  # type: ignore[misc]
    names = [field.name for field in fields(kind) if field.init]

    @functools.wraps(made)
    def init(self: object, *args: object, **given: object) -> None:
        given = {**dict(zip(names, args, strict=False)), **given}
        made(self, **(given if given.keys().isdisjoint(FORMER) else with_entries(given)))

    kind.__init__ = init  # type: ignore[misc]
    return kind


def with_entries(given: Mapping[str, object]) -> dict[str, object]:
    """The settings, with dotted and former names moved into the settings they belong to. `None` for a former name sets
    nothing. Raises `ConfigError` if a setting cannot have entries."""
    inner = {name: value for name, value in given.items() if name in FORMER or "." in name}
    settings = {name: value for name, value in given.items() if name not in inner}
    for name, value in inner.items():
        if value is not None or name not in FORMER:
            setting, *path = _place(name).split(".")
            if not path and settings.get(setting) is not None:
                raise ConfigError(f"`{name}` and `{setting}` are both set. Remove one.")
            settings[setting] = _placed(name, settings.get(setting), setting, path, from_json(value))
    return settings


@functools.cache
def _place(name: str) -> str:
    """The full path of a name. Logs former names, once."""
    if name in FORMER and os.environ.get("RANK", "0") == "0":
        logger.warning(f"`{name}` is now `{FORMER[name]}`; the next release removes the old name")
    return FORMER.get(name, name)


def _placed(name: str, current: object, setting: str, path: Sequence[str], value: object) -> object:
    """The value of a setting or entry, with a new value at a path. `name`: as given by the user."""
    if not path:
        return {**current, **value} if isinstance(current, Mapping) and isinstance(value, Mapping) else value
    if setting in _TEXTS and isinstance(current, str) and not current.startswith(("{", "[")):
        current = {_TEXTS[setting]: current}
    is_text = isinstance(current, str) and not current.startswith("{")
    if is_text or not isinstance(current, str | Mapping | None):
        found = f"`{name}` is set, but `{setting}` is a {type(current).__name__}"
        raise ConfigError(f"{found}. Set it inside that value instead.")
    entries = structure(setting, current or {}, dict)
    return {**entries, path[0]: _placed(name, entries.get(path[0]), path[0], path[1:], value)}
