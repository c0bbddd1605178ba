"""Dataset columns: names, types and validation, and the conversion of a record to a `SalesRow`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from salesrl_trl.data.pictures import read_pictures
from salesrl_trl.errors import DataError
from salesrl_trl.types import ALL, Message, Prompt, SalesRow

PROMPT_COLUMNS = ("prompt", "conversation")
"""A dataset needs one of these columns. `prompt` is the policy's input: a string or messages, as in TRL.
`conversation` is a list of {role, content}, oldest first."""
OPTIONAL_COLUMNS = (
    "branch", "id", "tenant_id", "contact_id", "account_id", "message_id", "documents", "images", "group"
)  # fmt: skip
KNOWN = frozenset((*PROMPT_COLUMNS, *OPTIONAL_COLUMNS, "image"))  # all others are passed to reward functions
ROLES = {"customer": "customer", "seller": "seller", "user": "customer", "assistant": "seller"}
"""Accepted role names, and the corresponding names in a `SalesRow`."""


def check_columns(columns: Iterable[str], source: str, branches: Sequence[str] = ()) -> None:
    """Raise `DataError` unless there is a prompt or conversation column, and with several branches a branch column."""
    columns = sorted(columns)
    has_prompt = any(name in columns for name in PROMPT_COLUMNS)
    if not has_prompt or (len(branches) > 1 and "branch" not in columns):
        lacking = f"branch, with one of {', '.join(branches)}" if has_prompt else " or ".join(PROMPT_COLUMNS)
        raise DataError(
            f"{source} lacks the column {lacking}. Got: {', '.join(columns) or 'no columns'}. Expected "
            f"{' or '.join(PROMPT_COLUMNS)} (and optionally {', '.join(OPTIONAL_COLUMNS)}). Rename or add the "
            "column, or map another one: `columns: {prompt: question}`. docs/reference/data.md shows a row."
        )


def parse_row(
    record: Mapping[str, object], position: int, branches: Sequence[str], source: str, line: int | None = None,
    folder: Path | None = None, row_name: str = "row",
) -> SalesRow:  # fmt: skip
    """Convert a record to a `SalesRow`. Rows without an id get one from their `position` in the source, counted from
    0. Without `branches`, any branch is accepted. Relative image paths are resolved against `folder`, by default the
    working directory. Raises `DataError` for invalid values, which states the row's position but never quotes it."""
    name = record.get("id")
    where = place(position, source, line, "" if name in (None, "") else f"; id {name!r}")
    branch = record.get("branch", (*branches, ALL)[0] if len(branches) <= 1 else None)
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
        or not all(isinstance(text, str) for text in documents)
    ):
        raise DataError(f"{where}: `documents` is {shape(documents)}. Expected a list of texts, or nothing.")
    turns = record.get("conversation")
    prompt = None if record.get("prompt") is None else _prompt(record["prompt"], where)
    images = read_pictures(record.get("images", record.get("image")), folder, where)
    if images and isinstance(prompt, str):
        text = f"{where}: `prompt` is a string, but the row has images. Expected messages for a chat template."
        raise DataError(text)
    return SalesRow(
        row_id=_id(record, "id", where) or f"{row_name}-{position}",
        branch=branch,
        conversation=() if prompt is not None and turns is None else _conversation(turns, where),
        prompt=prompt,
        tenant_id=_id(record, "tenant_id", where),
        contact_id=_id(record, "contact_id", where),
        account_id=_id(record, "account_id", where),
        message_id=_id(record, "message_id", where),
        documents=tuple(documents),
        images=images,
        columns={name: value for name, value in record.items() if name not in KNOWN},
        line=line,
    )


def place(position: int, source: str, line: int | None = None, more: str = "") -> str:
    """Describe a row's position: `"rows.jsonl, line 8, row 7 (counted from 0)"`."""
    return f"{source}, {'' if line is None else f'line {line}, '}row {position} (counted from 0{more})"


def _id(record: Mapping[str, object], name: str, where: str) -> str:
    """An id as written in the file: `"0"`, `"false"`, `"7.0"`. Empty if absent, e.g. pandas' NaN."""
    value = record.get(name)
    if value is None or value != value:
        return ""
    if isinstance(value, Mapping | list | bytes):
        raise DataError(f"{where}: `{name}` is {shape(value)}. Expected a text or a number.")
    return json.dumps(value) if isinstance(value, int | float) else str(value)


def _prompt(value: object, where: str) -> Prompt:
    if isinstance(value, str) and value.strip():
        return value
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(f"{where}: `prompt` is {shape(value)}. Expected a text, or a list of {{role, content}}.")
    for turn, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: turn {turn} of `prompt` is {shape(message)}. Expected {{role, content}}.")
        content = message.get("content")
        if not isinstance(content, list | str) and (content is not None or not message.get("tool_calls")):
            raise DataError(f"{where}: turn {turn} of `prompt` has content {shape(content)}. Expected a text.")
    return [dict(message) for message in value]


def _conversation(value: object, where: str) -> tuple[Message, ...]:
    expected = "a list of {role: customer | seller (or user | assistant), content: text} that ends with the customer"
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(f"{where}: `conversation` is {shape(value)}. Expected {expected}.")
    messages = []
    for turn, message in enumerate(value):
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or role not in ROLES or not isinstance(content, str) or not content.strip():
            raise DataError(
                f"{where}: turn {turn} of `conversation` has role {role!r} and content {shape(content)}. "
                f"Expected {expected}."
            )
        messages.append(Message(role=ROLES[role], content=content))
    if messages[-1].role != "customer":
        raise DataError(f"{where}: the seller has the last turn of `conversation`. Expected {expected}.")
    return tuple(messages)


def shape(value: object) -> str:
    """A value's type and length, without its content."""
    if value is None:
        return "missing"
    size = f" of length {len(value)}" if hasattr(value, "__len__") else ""
    return f"{type(value).__name__}{size}"
