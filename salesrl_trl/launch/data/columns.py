"""The `columns` of a dataset: which of a file's columns becomes which field of a row.

Owns the form of the setting, and conversations that are lists of texts or have other keys. `form` calls it for each
record, and `rows` checks the values.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from salesrl_trl.data.rows import OPTIONAL_COLUMNS, PROMPT_COLUMNS
from salesrl_trl.errors import ConfigError, DataError, nearest

FIELDS = (*PROMPT_COLUMNS, *OPTIONAL_COLUMNS)  # fields of a row that a column can give
_TURN_KEYS = {"column", "role", "content", "roles"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Where a field comes from: a column, or a constant. `role` and `content` are keys of a turn of `conversation`."""

    name: str | None  # the column. Dots lead into an object: `"meta.tenant"`. `None` for a constant.
    value: object = None
    role: str = "role"
    content: str = "content"
    roles: Mapping[str, str] = field(default_factory=dict)
    """Role in the file to role in a row: `{"human": "customer", "gpt": "seller"}`."""


def read_columns(setting: str, setting_value: Mapping[str, object]) -> dict[str, Column]:
    """The mapping of a recipe. `setting` is its name in messages.

    Each field of a row, one of `FIELDS` or another that a reward reads, has the name of a column, or `{"value":
    CONSTANT}`. The field `conversation` may also have `{"column": NAME, "role": KEY, "content": KEY, "roles": {ROLE:
    "customer" or "seller"}}`. Raises `ConfigError` for a name that is nearly one of `FIELDS`, or an unknown form.
    """
    for name in setting_value:
        if name not in FIELDS and (near := difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.8)):
            raise ConfigError(
                f"`{setting}` maps {name!r}, which is no field of a row. Did you mean {near[0]!r}? Expected: "
                f"{', '.join(FIELDS)}, or what a reward function takes."
            )
    return {name: _read_column(f"{setting}.{name}", name, entry) for name, entry in setting_value.items()}


def _read_column(where: str, name: str, entry: object) -> Column:
    if isinstance(entry, str) and entry:
        return Column(name=entry)
    if isinstance(entry, Mapping) and entry.keys() == {"value"}:
        return Column(name=None, value=entry["value"])
    if name == "conversation" and isinstance(entry, Mapping) and {"column"} <= entry.keys() <= _TURN_KEYS:
        column, role, content = (entry.get(key, key) for key in ("column", "role", "content"))
        roles = entry.get("roles", {})
        if all(isinstance(text, str) and text for text in (column, role, content)) and isinstance(roles, Mapping):
            roles = {str(key): str(value) for key, value in roles.items()}
            return Column(name=column, role=role, content=content, roles=roles)
    turns = ", or {column: NAME, role: KEY, content: KEY, roles: {ROLE: customer}}" if name == "conversation" else ""
    raise ConfigError(f"`{where}` has another form. Expected the name of a column, or {{value: CONSTANT}}{turns}.")


def check_names(columns: Mapping[str, Column], records: Iterable[Mapping[str, object]], source: str) -> None:
    """Raise `DataError` if no record has a column that the mapping names."""
    wanted = {name: column.name for name, column in columns.items() if column.name is not None}
    if not wanted:
        return
    known = dict.fromkeys(name for record in records for name in _names(record))
    for name, column in wanted.items():
        if column not in known:
            raise DataError(
                f"{source} has no column {column!r}, from which `columns` takes {name!r}.{nearest(column, known)} "
                f"There are: {', '.join(known) or 'no columns'}. Correct the name."
            )


def mapped(columns: Mapping[str, Column], record: Mapping[str, object]) -> dict[str, object]:
    """The mapped fields of a record. A column that this record lacks gives `None`."""
    return {name: _field(name, column, record) for name, column in columns.items()}


def alternating(texts: Sequence[object]) -> list[dict[str, object]]:
    """Turns whose roles alternate and whose last one is the customer's."""
    last = len(texts) - 1
    return [
        {"role": "seller" if (last - turn) % 2 else "customer", "content": text} for turn, text in enumerate(texts)
    ]


def _field(name: str, column: Column, record: Mapping[str, object]) -> object:
    value = column.value if column.name is None else _look_up(record, column.name)
    if name == "documents" and isinstance(value, str):
        return [value] if value.strip() else []
    if name != "conversation":
        return value
    if isinstance(value, str):
        return [{"role": "customer", "content": value}]
    if not isinstance(value, Sequence):
        return value
    if all(isinstance(turn, str) for turn in value):
        return alternating(value)
    turns = []
    for turn in value:
        if isinstance(turn, Mapping):
            role = turn.get(column.role)
            role = column.roles.get(role, role) if isinstance(role, str) else role
            turns.append({"role": role, "content": turn.get(column.content)})
        else:
            turns.append(turn)
    return turns


def _look_up(record: Mapping[str, object], name: str) -> object:
    if name in record:
        return record[name]
    first, dot, rest = name.partition(".")
    inner = record.get(first)
    return _look_up(inner, rest) if dot and isinstance(inner, Mapping) else None


def _names(record: Mapping[str, object], before: str = "") -> Iterator[str]:
    """Names of the columns, and with dots those inside of objects."""
    for name, value in record.items():
        yield f"{before}{name}"
        if isinstance(value, Mapping):
            yield from _names(value, f"{before}{name}.")
