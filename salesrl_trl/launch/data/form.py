"""The form of a source (format, columns, held-out share), and the mixture of several sources."""

import dataclasses
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from salesrl_trl.data.files import Placed, Record
from salesrl_trl.data.rows import KNOWN, place
from salesrl_trl.errors import ConfigError, DataError, nearest
from salesrl_trl.launch.data.formats import DatasetFormat, LeftOut, alternating

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """The source of a field: a column or a constant. `role` and `content` are the keys of a turn of `conversation`."""

    name: str | None  # the column, with dots for nested fields: `"meta.tenant"`. `None` for a constant.
    value: object = None
    role: str = "role"
    content: str = "content"
    roles: Mapping[str, str] = field(default_factory=dict)
    """Maps roles in the file to roles in a row: `{"human": "customer", "gpt": "seller"}`."""


class Portion(StrEnum):
    ALL = "all"
    TRAINING = "training"
    HELD_OUT = "held-out"


@dataclass(frozen=True, kw_only=True)
class Form:
    """How to convert the records of a source to rows."""

    format: DatasetFormat | None = None
    """`None` for records in this package's columns."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """Fields read from other columns. They take precedence over those of the format."""
    held_out_share: float = 0.0
    """Share of the groups to hold out, in [0, 1)."""
    name: str = ""
    """Name of the source if there are several. It prefixes the ids of its rows: `"bbq:bbq-Age-7"`."""


@dataclass(frozen=True, kw_only=True)
class Records:
    """The records of a source in this package's columns, before checks."""

    name: str  # of the source, in messages
    rows: Sequence[Placed]
    total: int  # records of the source, including excluded ones and those of other parts
    left_out: Mapping[str, int] = field(default_factory=dict)  # excluded records by reason
    folder: Path | None = None  # base of relative picture paths; `None` for the working directory
    row_name: str = "row"  # prefix of generated row ids

    @property
    def note(self) -> str | None:
        """A line for the banner about excluded records; `None` if there are none."""
        if not self.left_out:
            return None
        count = sum(self.left_out.values())
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in self.left_out.items())
        return f"{count:,} of {self.total:,} records of {self.name} are excluded: {reasons}"


def converted(placed: Sequence[Placed], name: str, form: Form, folder: Path | None = None) -> Records:
    """The records of a source in `folder`, in this package's columns. Raises `DataError` for a malformed record."""
    check_names(form.columns, (item.record for item in placed), name)
    rows, left_out = list[Placed](), Counter[str]()
    for position, (record, line, _) in enumerate(placed):
        made = _row(form, record, place(position, name, line))
        if isinstance(made, LeftOut):
            left_out[made.reason] += 1
        else:
            if form.name:
                made_id = f"row-{position}" if made.get("id") in (None, "") else made["id"]
                made = {**made, "id": f"{form.name}:{made_id}"}
            rows.append(Placed(made, line, position))
    return Records(name=name, rows=rows, total=len(placed), left_out=left_out, folder=folder)


def _row(form: Form, record: Record, where: str) -> Record | LeftOut:
    if form.format is None:
        return {**record, **mapped(form.columns, record)}
    try:
        made = form.format.row(record)
    except DataError as error:
        kind = type(form.format).__name__
        raise DataError(f"{where} is not a {kind} record: {error}. Correct it or the dataset's `format`.") from None
    if isinstance(made, LeftOut):
        return made
    known = KNOWN | form.format.hidden
    others = {name: value for name, value in record.items() if name not in known}
    return {**others, **made, **mapped(form.columns, record)}


def drawn(rows: Sequence[T], number: int) -> Sequence[T]:
    """Up to `number` rows in their order: a reproducible sample of the whole source."""
    if number >= len(rows):
        return rows
    order = sorted((hashlib.sha256(str(at).encode()).digest(), at) for at in range(len(rows)))
    return [rows[at] for at in sorted(at for _, at in order[:number])]


def mixed(parts: Sequence[Sequence[T]], shares: Sequence[float] = ()) -> list[T]:
    """The rows of all parts, each spread evenly over the whole. `shares`, which sum to 1, are the shares of the parts:
    as many rows are drawn as the scarcest part allows."""
    if shares:
        total = min(len(part) / share for part, share in zip(parts, shares, strict=True))
        parts = [drawn(part, round(total * share)) for part, share in zip(parts, shares, strict=True)]
    places = [((at + 0.5) / len(part), number, at) for number, part in enumerate(parts) for at in range(len(part))]
    return [parts[number][at] for _, number, at in sorted(places)]


def part_of(records: Records, form: Form, part: Portion) -> Records:
    """The records of one part. Records of a group (the same `group`, or else the same first turn of `conversation`, or
    the same `prompt`) belong to the same part. At least one group is held out. Raises `DataError` if the part is
    empty."""
    if part is Portion.ALL:
        return records
    groups = [_group(row.record) for row in records.rows]
    # A number in [0, 1) that only depends on the group
    digests = [hashlib.sha256(group.encode(errors="surrogatepass")).digest() for group in groups]
    numbers = [int.from_bytes(digest[:6]) / 2**48 for digest in digests]
    least = min(numbers, default=0.0)
    held_out = part is Portion.HELD_OUT
    fits = [(number < form.held_out_share or number == least) == held_out for number in numbers]
    wanted = [*itertools.compress(records.rows, fits)]
    if groups and not wanted:
        found = f"the held-out share of {form.held_out_share:g} leaves no {part.value} group of {records.name}"
        remedy = "Set another share or group column (`--dataset.columns {group: COLUMN}`), or `eval_dataset`."
        raise DataError(f"{found} ({len(set(groups))} in total). {remedy}")
    return dataclasses.replace(records, rows=wanted, left_out={} if held_out else records.left_out)


def _group(record: Record) -> str:
    if (group := record.get("group")) is not None:
        return str(group)
    turns = record.get("conversation")
    if turns is None and (prompt := record.get("prompt")) is not None:
        return json.dumps(prompt, sort_keys=True, default=str)
    first = turns[0] if isinstance(turns, Sequence) and turns else None
    return str(first.get("content")) if isinstance(first, Mapping) else str(first)


def read_columns(setting: str, setting_value: Mapping[str, object]) -> dict[str, Column]:
    """The column mapping of a recipe. `setting`: its name in messages.

    Maps each field of a row, including those that rewards read, to the name of a column or to `{"value": CONSTANT}`,
    and `conversation` also to `{"column": NAME, "role": KEY, "content": KEY, "roles": {ROLE: "customer" or
    "seller"}}`. Raises `ConfigError` for anything else.
    """
    return {name: _read_column(f"{setting}.{name}", name, entry) for name, entry in setting_value.items()}


def _read_column(where: str, name: str, entry: object) -> Column:
    if isinstance(entry, str) and entry:
        return Column(name=entry)
    if isinstance(entry, Mapping) and entry.keys() == {"value"}:
        return Column(name=None, value=entry["value"])
    keys = ("column", "role", "content")
    if name == "conversation" and isinstance(entry, Mapping) and {"column"} <= entry.keys() <= {*keys, "roles"}:
        column, role, content = (entry.get(key, key) for key in keys)
        roles = entry.get("roles", {})
        if all(isinstance(text, str) and text for text in (column, role, content)) and isinstance(roles, Mapping):
            roles = {str(key): str(value) for key, value in roles.items()}
            return Column(name=column, role=role, content=content, roles=roles)
    turns = ", or {column: NAME, role: KEY, content: KEY, roles: {ROLE: customer}}" if name == "conversation" else ""
    raise ConfigError(f"`{where}` is invalid. Expected the name of a column, or {{value: CONSTANT}}{turns}.")


def check_names(columns: Mapping[str, Column], records: Iterable[Mapping[str, object]], source: str) -> None:
    """Raise `DataError` if no record has a column named in the mapping."""
    wanted = {name: column.name for name, column in columns.items() if column.name is not None}
    known = dict.fromkeys(name for record in records for name in _names(record)) if wanted else {}
    for name, column in wanted.items():
        if column not in known:
            near = f"{nearest(column, known)} Expected one of: {', '.join(known) or 'no columns'}."
            raise DataError(f"{source} lacks the column {column!r}, which `columns` maps to {name!r}.{near}")


def mapped(columns: Mapping[str, Column], record: Mapping[str, object]) -> dict[str, object]:
    """The mapped fields of a record; `None` for columns that it lacks."""
    return {name: _field(name, column, record) for name, column in columns.items()}


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
    return [_turn(column, turn) for turn in value]


def _turn(column: Column, turn: object) -> object:
    if not isinstance(turn, Mapping):
        return turn
    role = turn.get(column.role)
    return {"role": column.roles.get(str(role), role), "content": turn.get(column.content)}


def _look_up(record: Mapping[str, object], name: str) -> object:
    if name in record:
        return record[name]
    first, dot, rest = name.partition(".")
    inner = record.get(first)
    return _look_up(inner, rest) if dot and isinstance(inner, Mapping) else None


def _names(record: Mapping[str, object], before: str = "") -> Iterator[str]:
    for name, value in record.items():
        yield f"{before}{name}"
        if isinstance(value, Mapping):
            yield from _names(value, f"{before}{name}.")
