"""Settings by names with a dot, such as `branch_kl.settings.law`, and by the names that they had before.

`former.toml` has the former names. Classes of settings take them by `takes_former_names`, recipes and command lines
by `with_entries`.
"""

import functools
import logging
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from salesrl_trl.config.checks import structure
from salesrl_trl.config.keys import from_json
from salesrl_trl.errors import ConfigError

Kind = TypeVar("Kind", bound=type)

logger = logging.getLogger(__name__)

FORMER: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
"""By a former name: the setting, and behind a dot its entry."""
_TEXTS = {"dataset": "path", "eval_dataset": "path", "rag": "client", "judge_mode": "mode"}
"""Settings that may be a text, and the entry that it stands for."""


def takes_former_names(kind: Kind) -> Kind:
    """Let a dataclass of settings take former names too."""
    made = kind.__init__  # type: ignore[misc]
    names = [field.name for field in fields(kind) if field.init]

    @functools.wraps(made)
    def init(self: object, *args: object, **given: object) -> None:
        given = {**dict(zip(names, args, strict=False)), **given}
        made(self, **(given if given.keys().isdisjoint(FORMER) else with_entries(given)))

    kind.__init__ = init  # type: ignore[misc]
    return kind


def with_entries(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with those by dotted and by former names inside the ones that they belong to. `None` for a former
    name sets nothing. Raises `ConfigError` where a setting has no entries."""
    inner = {name: value for name, value in given.items() if name in FORMER or "." in name}
    settings = {name: value for name, value in given.items() if name not in inner}
    for name, value in inner.items():
        if value is not None or name not in FORMER:
            setting, *path = _place(name).split(".")
            if not path and settings.get(setting) is not None:
                raise ConfigError(f"`{name}` is given beside `{setting}`. Expected one of them.")
            settings[setting] = _placed(name, settings.get(setting), setting, path, _plain(value))
    return settings


@functools.cache
def _place(name: str) -> str:
    """Where a name belongs. A former one is logged, once."""
    if name in FORMER and os.environ.get("RANK", "0") == "0":
        logger.warning(f"`{name}` is `{FORMER[name]}` now. The old name goes with the next release")
    return FORMER.get(name, name)


def _plain(value: object) -> object:
    return from_json(value) if isinstance(value, str) else value


def _placed(name: str, current: object, setting: str, path: Sequence[str], value: object) -> object:
    """The value of a setting, or of one of its entries, with a new one at a path. `name`: as it was given."""
    if not path:
        return {**current, **value} if isinstance(current, Mapping) and isinstance(value, Mapping) else value
    if setting in _TEXTS and isinstance(current, str) and not current.startswith(("{", "[")):
        current = {_TEXTS[setting]: current}
    is_text = isinstance(current, str) and not current.startswith("{")
    if is_text or not isinstance(current, str | Mapping | None):
        raise ConfigError(
            f"`{name}` is given beside `{setting}`, a {type(current).__name__}. Expected it in an entry of that."
        )
    entries = structure(setting, current or {}, dict)
    return {**entries, path[0]: _placed(name, entries.get(path[0]), path[0], path[1:], value)}
