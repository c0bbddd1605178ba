"""Local files: records with line numbers, a knowledge base, and error messages about unreadable files."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from salesrl_trl.errors import DataError, nearest
from salesrl_trl.ground.texts import encodable

DEMO = "demo"  # dataset name of the built-in conversations
DEMO_PICTURES = "demo_pictures"
DEMO_BBQ, DEMO_HALUEVAL = "demo_bbq", "demo_halueval"  # for `recipes/dual.py`, from `scripts/make_two_tasks.py`
ARITHMETIC = "arithmetic"  # for `recipes/own.py`, from `scripts/make_arithmetic_rows.py`
DEMO_SEARCH = "demo_search"  # for `recipes/search.py`, from `scripts/make_search_rows.py`
DEMO_DIALOGUE = "demo_dialogue"  # for `recipes/dialogue.py`, from `scripts/make_dialogue_rows.py`
DEMO_PICTURES_FOLDER = Path("runs") / DEMO_PICTURES  # where `scripts/demo_pictures.py` writes that dataset
FILES = {"train": "train.jsonl", "heldout": "heldout.jsonl"}  # of the demo's datasets, by split
Record = dict[str, Any]  # a dataset row as loaded
ENDINGS = (".jsonl", ".json", ".parquet")
"""Supported file types. A `.json` file contains a list of objects, or one object per line."""


class Placed(NamedTuple):
    """A record and its position in its source."""

    record: Record
    line: int | None = None  # line number, from 1; `None` if records are not lines
    position: int = 0  # index among the records, from 0


def demo_path(name: str) -> Path:
    """A built-in demo file: `{knowledge,train,drafts,heldout}.jsonl`, `protected_terms.json`, or one in a
    subfolder."""
    return Path(str(resources.files("salesrl_trl.demo.rows") / name))


def demo_records(name: str) -> list[Record]:
    return [line.record for line in read_lines(demo_path(name))]


def read_file(path: Path) -> list[Placed]:
    """Read a local file's records. Raises `DataError`, which states the position but never quotes the file."""
    if path.stat().st_size == 0:
        return []
    if path.suffix == ".jsonl":
        return list(read_lines(path))
    try:
        if path.suffix == ".parquet":
            from datasets import load_dataset  # imports pandas

            return [Placed(record) for record in load_dataset("parquet", data_files=str(path), split="train")]
        text = path.read_text(encoding="utf-8-sig")
        if not text.lstrip().startswith("["):
            return list(read_lines(path))
        records = encodable(json.loads(text), str(path))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, {unreadable(error)}.") from None
    except DataError:
        raise
    except Exception as error:  # pyarrow's and pandas' messages quote the file
        raise DataError(
            f"{path} can't be read as {path.suffix} ({type(error).__name__}). Expected rows with the same columns: "
            "docs/reference/data.md shows one. Correct the file."
        ) from None
    for position, record in enumerate(records):
        if not isinstance(record, dict):
            fault = f"{path}, row {position} (counted from 0) is a {type(record).__name__}. Expected a JSON object."
            raise DataError(fault)
    return [Placed(record) for record in records]


def read_lines(path: Path) -> Iterator[Placed]:
    """Read a file with one JSON object per line. Skips empty lines. Raises like `read_file`."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = encodable(json.loads(line.decode("utf-8-sig")), f"a line of {path}")
                fault = "" if isinstance(record, dict) else f" is a {type(record).__name__}"
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, line {number}: {unreadable(error).removeprefix('line 1, ')}.") from None
            except json.JSONDecodeError as error:
                fault = f" is not JSON ({error.msg}, column {error.colno})"
            except (ValueError, RecursionError) as error:
                name = type(error).__name__
                fault = f" can't be read ({name}): a number has thousands of digits, or lists are nested too deeply"
            if fault:
                raise DataError(f"{path}, line {number}{fault}. Expected one JSON object per line. Correct it.")
            yield Placed(record, number)


def nearest_file(path: Path | str) -> str:
    """`" Did you mean 'rows.jsonl'?"`: for a path that does not exist, the most similarly named entry in its folder.
    Empty if the path exists or no name is similar."""
    wanted = Path(path).expanduser()
    with contextlib.suppress(OSError):  # its folder does not exist either, or is unreadable
        return "" if wanted.exists() else nearest(wanted.name, [entry.name for entry in wanted.parent.iterdir()])
    return ""


def unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Describe the error, e.g. `"line 3, byte 17 (0xe9) is not UTF-8: ..."`."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    before = error.object[: error.start]
    line, byte = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
    value = error.object[error.start]
    return f"line {line}, byte {byte} (0x{value:02x}) is not UTF-8: is it Latin-1 or GBK? Save the file as UTF-8"


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """An entry of the knowledge base: a unique id, e.g. `"zh-python-price"`, a text suitable for customers, and a
    title, which is indexed with the text but never part of an answer."""

    id: str
    text: str
    title: str = ""


def load_documents(path: Path | str) -> tuple[Document, ...]:
    """Read a knowledge base: JSON lines with `id`, `text` and optionally `title`; other keys are ignored. Raises
    `DataError` if the file is unreadable or empty, or a line is invalid or repeats an id."""
    documents: dict[str, Document] = {}
    try:
        for record, line, _ in read_lines(Path(path)):
            values = {"id": record.get("id"), "text": record.get("text"), "title": record.get("title", "")}
            is_text = all(isinstance(value, str) for value in values.values())
            if not is_text or not values["id"].strip() or not values["text"].strip():
                raise DataError(
                    f"{path}, line {line} is not a document. Expected "
                    '{"id": "...", "text": "..."} with strings and optionally a "title"; correct the line'
                )
            document = Document(**values)
            if document.id in documents:
                raise DataError(f"{path}, line {line}: id {document.id!r} is used twice; make every id unique")
            documents[document.id] = document
    except OSError as error:
        fault = unreadable(error)
        raise DataError(
            f"cannot read the knowledge base {path}: {fault};{nearest_file(path)} provide a UTF-8 file of JSON lines"
        ) from error
    if not documents:
        raise DataError(f"{path} contains no documents. Expected at least one JSON line; add one")
    return tuple(documents.values())


def read_yaml(path: Path) -> object:
    """Parse a YAML file with the safe loader."""
    return yaml.safe_load(path.read_text("utf-8-sig"))
