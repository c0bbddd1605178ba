"""A knowledge base: the documents from which the embedded RAG service answers.

Owns the form of its file. Refuses to search it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from salesrl_trl.data.files import read_small, unreadable
from salesrl_trl.errors import DataError

MOST_BYTES = 2**30
"""Largest file of a knowledge base. All of it is held in memory, several times while it is indexed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One entry of the knowledge base."""

    id: str
    """Unique in the knowledge base, such as `"zh-python-price"`."""
    text: str
    """Text that a customer may read."""
    title: str = ""
    """Indexed with the text. Never part of an answer."""


def load_documents(path: Path | str) -> tuple[Document, ...]:
    """Read a knowledge base: JSON lines with `id`, `text` and optionally `title`. Other keys are ignored.

    Raises `DataError` if the file can't be read or is empty, or a line is no such object or repeats an id.
    """
    try:
        lines = read_small(Path(path), MOST_BYTES).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        fault = unreadable(error)
        raise DataError(f"cannot read the knowledge base {path}: {fault}; give a UTF-8 file of JSON lines") from error
    documents: dict[str, Document] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            document = _read_document(line, f"{path}, line {number}")
            if document.id in documents:
                raise DataError(f"{path}, line {number}: id {document.id!r} is used twice; make every id unique")
            documents[document.id] = document
    if not documents:
        raise DataError(f"{path}: got no documents, expected at least one JSON line; add one")
    return tuple(documents.values())


def _read_document(line: str, where: str) -> Document:
    expected = 'expected {"id": "...", "text": "..."} and, if you like, a "title"'
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: got no JSON, {expected}; write one object a line") from error
    if not isinstance(entry, dict):
        raise DataError(f"{where}: got a JSON {type(entry).__name__}, {expected}; write one object a line")
    return Document(
        id=_text_field(entry, "id", where, expected),
        text=_text_field(entry, "text", where, expected),
        title=_text_field({"title": ""} | entry, "title", where, expected, required=False),
    )


def _text_field(entry: Mapping[str, object], name: str, where: str, expected: str, required: bool = True) -> str:
    value = entry.get(name)
    if not isinstance(value, str) or (required and not value.strip()):
        got = "an empty text" if isinstance(value, str) else "nothing" if value is None else type(value).__name__
        raise DataError(f"{where}: got {got} for {name!r}, {expected}; correct the line")
    return value
