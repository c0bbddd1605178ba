"""From dataset columns to `SalesRow`: names, types and checks.

Owns the columns of a dataset. `sources` loads the records and calls it. Refuses to know the use of a row.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from salesrl_trl.data.pictures import read_pictures
from salesrl_trl.errors import DataError
from salesrl_trl.types import Message, SalesRow

REQUIRED_COLUMNS = ("branch", "conversation")
"""Columns that a dataset needs. `conversation` is a list of {role, content}, oldest first."""
OPTIONAL_COLUMNS = ("id", "tenant_id", "contact_id", "account_id", "message_id", "documents", "images", "group")
_KNOWN = frozenset((*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS, "image"))
ROLES = {"customer": "customer", "seller": "seller", "user": "customer", "assistant": "seller"}
"""Accepted names of a turn's role, and the names in a `SalesRow`."""


def check_columns(columns: Iterable[str], source: str) -> None:
    """Raise `DataError` unless every required column is there."""
    columns = sorted(columns)
    missing = [name for name in REQUIRED_COLUMNS if name not in columns]
    if missing:
        raise DataError(
            f"{source} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}. "
            f"Got: {', '.join(columns) or 'no columns'}. Expected: {', '.join(REQUIRED_COLUMNS)} "
            f"(and, where known, {', '.join(OPTIONAL_COLUMNS)}). Rename or add the columns; docs/DATA.md shows a row."
        )


def parse_row(
    record: Mapping[str, object],
    position: int,
    branches: Sequence[str],
    source: str,
    line: int | None = None,
    folder: Path | None = None,
) -> SalesRow:
    """One record as a `SalesRow`. Its `position` in the source, counted from 0, is the id of a row that has none.
    Without `branches` any branch is taken. Relative paths of pictures start in `folder`, or in the working directory.
    Raises `DataError` if a value is not as expected. The message has the row's place, and never its text."""
    name = record.get("id")
    where = place(position, source, line, f"; id {name!r}" if name else "")
    branch = record.get("branch")
    if not isinstance(branch, str) or (branches and branch not in branches):
        expected = f"one of: {', '.join(branches)}" if branches else "a text"
        raise DataError(
            f"{where}: branch {branch!r} is not configured. Expected {expected}. "
            f"Correct the column, or add the branch to `branches` and give it a rubric."
        )
    documents = record.get("documents")
    documents = () if documents is None else documents
    if (
        not isinstance(documents, Sequence)
        or isinstance(documents, str)
        or not all(isinstance(text, str) and is_unicode(text) for text in documents)
    ):
        raise DataError(f"{where}: `documents` is {shape(documents)}. Expected a list of texts, or nothing.")
    return SalesRow(
        row_id=str(record.get("id") or f"row-{position}"),
        branch=branch,
        conversation=_conversation(record.get("conversation"), where),
        tenant_id=str(record.get("tenant_id") or ""),
        contact_id=str(record.get("contact_id") or ""),
        account_id=str(record.get("account_id") or ""),
        message_id=str(record.get("message_id") or ""),
        documents=tuple(documents),
        images=read_pictures(record.get("images", record.get("image")), folder, where),
        columns={name: value for name, value in record.items() if name not in _KNOWN},
    )


def place(position: int, source: str, line: int | None = None, more: str = "") -> str:
    """A row's place in words: `"rows.jsonl, line 8, row 7 (counted from 0)"`."""
    return f"{source}, {'' if line is None else f'line {line}, '}row {position} (counted from 0{more})"


def is_unicode(text: str) -> bool:
    """Whether the text can be sent and written. Half a surrogate pair, which JSON can contain, can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _conversation(value: object, where: str) -> tuple[Message, ...]:
    expected = "a list of {role: customer | seller (or user | assistant), content: text} that ends with the customer"
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(f"{where}: `conversation` is {shape(value)}. Expected {expected}.")
    messages = []
    for turn, message in enumerate(value):
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else None
        if (
            not isinstance(role, str)
            or role not in ROLES
            or not isinstance(content, str)
            or not content.strip()
            or not is_unicode(content)
        ):
            raise DataError(
                f"{where}: turn {turn} of `conversation` has role {role!r} and content {shape(content)}. "
                f"Expected {expected}."
            )
        messages.append(Message(role=ROLES[role], content=content))
    if messages[-1].role != "customer":
        raise DataError(f"{where}: the seller has the last turn of `conversation`. Expected {expected}.")
    return tuple(messages)


def shape(value: object) -> str:
    """Type and length of a value, without its text."""
    if value is None:
        return "missing"
    size = f" of length {len(value)}" if hasattr(value, "__len__") else ""
    return f"{type(value).__name__}{size}"
