"""A knowledge base: the documents from which the embedded RAG service answers.

Owns the form of its file. Refuses to search it. The demo's services read it, and the checks before a run.
"""

from dataclasses import dataclass
from pathlib import Path

from salesrl_trl.data.files import read_lines, unreadable
from salesrl_trl.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One entry of the knowledge base: its unique id, such as `"zh-python-price"`, a text that a customer may read,
    and a title, which is indexed with the text and never part of an answer."""

    id: str
    text: str
    title: str = ""


def load_documents(path: Path | str) -> tuple[Document, ...]:
    """Read a knowledge base: JSON lines with `id`, `text` and optionally `title`. Other keys are ignored. Raises
    `DataError` if the file can't be read or is empty, or a line is no such object or repeats an id."""
    documents: dict[str, Document] = {}
    try:
        for record, line in read_lines(Path(path)):
            for name, value in {"id": None, "text": None, "title": "", **record}.items():
                if name not in Document.__slots__ or (isinstance(value, str) and (value.strip() or name == "title")):
                    continue
                got = "an empty text" if isinstance(value, str) else type(value).__name__
                raise DataError(
                    f"{path}, line {line}: got {'nothing' if value is None else got} for {name!r}, expected "
                    '{"id": "...", "text": "..."} and, if you like, a "title"; correct the line'
                )
            document = Document(**{name: record[name] for name in Document.__slots__ if name in record})
            if document.id in documents:
                raise DataError(f"{path}, line {line}: id {document.id!r} is used twice; make every id unique")
            documents[document.id] = document
    except OSError as error:
        fault = unreadable(error)
        raise DataError(f"cannot read the knowledge base {path}: {fault}; give a UTF-8 file of JSON lines") from error
    if not documents:
        raise DataError(f"{path}: got no documents, expected at least one JSON line; add one")
    return tuple(documents.values())
