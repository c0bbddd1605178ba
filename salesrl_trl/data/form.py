"""The form of a source: its format, its columns, and the share that is held out.

Owns the way from a record of any form to the columns of this package, the division into training and held-out rows,
and the mixture of several sources. Refuses to load. `sources` and `build.checks.dataset` call it.
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from salesrl_trl.data.columns import Column, check_names, mapped
from salesrl_trl.data.files import Placed, Record
from salesrl_trl.data.formats import DatasetFormat, LeftOut
from salesrl_trl.data.rows import KNOWN, place
from salesrl_trl.errors import DataError


class Part(StrEnum):
    ALL = "all"
    TRAINING = "training"
    HELD_OUT = "held-out"


@dataclass(frozen=True, kw_only=True)
class Form:
    """How the records of a source become rows."""

    format: DatasetFormat | None = None
    """`None` for records with this package's columns."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """Fields that are taken from other columns. They win over those of the format."""
    held_out_share: float = 0.0
    """Share of the groups whose rows are held out, in [0, 1)."""
    image_folder: Path | None = None
    """Where relative paths of pictures start. `None`: the folder of the file."""
    name: str = ""
    """Of the source among several. It stands before the ids of its rows: `"bbq:bbq-Age-7"`."""


class Place(NamedTuple):
    """Where a record is: its source, its position there, counted from 0, and its line, counted from 1. Relative paths
    of its pictures start in `folder`, or in the working directory."""

    source: str
    position: int
    line: int | None
    folder: Path | None


@dataclass(frozen=True, kw_only=True)
class Records:
    """The records of a source in this package's columns, before they are checked."""

    name: str
    """Of the source, or of all of them, in messages."""
    records: list[Record]
    places: list[Place]
    """Of each record."""
    total: int
    """Records of the source, those that were left out or belong to another part included."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Records that make no rows, by reason."""

    @property
    def note(self) -> str | None:
        """Line for the banner about the records that were left out; `None` if there are none."""
        if not self.left_out:
            return None
        count = sum(self.left_out.values())
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in self.left_out.items())
        return f"{count:,} of {self.total:,} records of {self.name} make no row: {reasons}"


def converted(placed: Sequence[Placed], name: str, form: Form, folder: Path | None = None) -> Records:
    """The records of a source that lies in `folder`, in this package's columns. Raises `DataError` for a bad one."""
    check_names(form.columns, (item.record for item in placed), name)
    records, places, left_out = list[Record](), list[Place](), Counter[str]()
    seen: dict[object, int] = {}
    for position, (record, line) in enumerate(placed):
        made = _row(form, record, place(position, name, line))
        if form.format is not None and not isinstance(made, LeftOut):
            first = seen.setdefault(made.get("id"), position)
            if first != position and placed[first].record == record:
                made = LeftOut("repeat an earlier record")
            elif first != position:
                raise DataError(
                    f"{place(position, name, line)} has the id {made.get('id')!r} of row {first}, and other content. "
                    "Expected each record once. Correct the file."
                )
        if isinstance(made, LeftOut):
            left_out[made.reason] += 1
        else:
            id_ = {"id": f"{form.name}:{made.get('id') or f'row-{position}'}"} if form.name else {}
            records.append({**made, **id_})
            places.append(Place(name, position, line, form.image_folder or folder))
    return Records(name=name, records=records, places=places, total=len(placed), left_out=left_out)


def _row(form: Form, record: Record, where: str) -> Record | LeftOut:
    if form.format is None:
        return {**record, **mapped(form.columns, record)}
    try:
        made = form.format.row(record)
    except DataError as error:
        kind = type(form.format).__name__
        raise DataError(f"{where} is no record of {kind}: {error}. Correct it, or `dataset_format`.") from None
    if isinstance(made, LeftOut):
        return made
    others = () if form.format.fields is None else [*record.keys() - KNOWN - {*form.format.fields}]
    own = {name: value for name, value in record.items() if name in others}
    return {**own, **made, **mapped(form.columns, record)}


def check_not_empty(records: Records) -> None:
    """Raise `DataError` without records."""
    if not records.records:
        raise DataError(
            f"{records.name} is empty{f' ({records.note})' if records.note else ''}. Expected at least one row with "
            "the column prompt or conversation. Check the path, the split and `max_*_rows`."
        )


def drawn(records: Records, number: int) -> Records:
    """So many of the records, or all, in their order: the same ones each time, from all over the source."""
    if number >= len(records.records):
        return records
    order = sorted(range(len(records.records)), key=lambda at: hashlib.sha256(str(at).encode()).digest())
    return _at(records, sorted(order[:number]))


def mixed(parts: Sequence[Records], shares: Sequence[float] = ()) -> Records:
    """The records of all sources, each one's spread evenly over the whole, so that a beginning of it is mixed too.
    With `shares`, which sum to 1, each source has this share: as many rows are drawn as the scarcest allows."""
    if len(parts) == 1:
        return parts[0]
    for part in parts:
        check_not_empty(part)
    if shares:
        total = min(len(part.records) / share for part, share in zip(parts, shares, strict=True))
        parts = [drawn(part, round(total * share)) for part, share in zip(parts, shares, strict=True)]
    order = sorted(
        ((at + 0.5) / len(part.records), number, at)
        for number, part in enumerate(parts)
        for at in range(len(part.records))
    )
    return Records(
        name=", ".join(part.name for part in parts),
        records=[parts[number].records[at] for _, number, at in order],
        places=[parts[number].places[at] for _, number, at in order],
        total=sum(part.total for part in parts),
        left_out=sum((Counter(part.left_out) for part in parts), Counter()),
    )


def part_of(records: Records, form: Form, part: Part) -> Records:
    """The records of one part. Those of a group are in the same part: of one value of `group`, or without it of one
    first turn, as the rows of a conversation have, or of one `prompt`. At least one group is held out. Raises
    `DataError` if no record is in the part."""
    if part is Part.ALL:
        return records
    groups = [_group(record) for record in records.records]
    # A number in [0, 1) that depends on the group alone
    digests = [hashlib.sha256(group.encode(errors="surrogatepass")).digest() for group in groups]
    numbers = [int.from_bytes(digest[:6]) / 2**48 for digest in digests]
    least = min(numbers, default=0.0)
    held_out = [number < form.held_out_share or number == least for number in numbers]
    wanted = [at for at, is_held_out in enumerate(held_out) if is_held_out == (part is Part.HELD_OUT)]
    if groups and not wanted:
        raise DataError(
            f"`held_out_share` is {form.held_out_share:g}, and of the {len(set(groups))} groups of {records.name} "
            f"none is {part.value}. Expected conversations enough for both parts. Set another share, name what parts "
            "them (`columns: {group: COLUMN}`), or give the held-out rows in `eval_dataset`."
        )
    return dataclasses.replace(_at(records, wanted), left_out=records.left_out if part is Part.TRAINING else {})


def _at(records: Records, chosen: Sequence[int]) -> Records:
    """The records at these indices."""
    return dataclasses.replace(
        records,
        records=[records.records[at] for at in chosen],
        places=[records.places[at] for at in chosen],
    )


def _group(record: Record) -> str:
    if (group := record.get("group")) is not None:
        return str(group)
    turns = record.get("conversation")
    if turns is None and (prompt := record.get("prompt")) is not None:
        return json.dumps(prompt, sort_keys=True, default=str)
    first = turns[0] if isinstance(turns, Sequence) and turns else None
    return str(first.get("content")) if isinstance(first, Mapping) else str(first)
