"""Where rows come from: the packaged demo, local files, the Hugging Face hub.

Owns loading, subsets and the dataset for TRL. `rows` checks a row, `prompts` builds the prompt.
"""

import json
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from salesrl_trl.data.prompts import build_prompt
from salesrl_trl.data.rows import check_columns, parse_row
from salesrl_trl.data.templates import PromptTemplate
from salesrl_trl.data.text import unreadable
from salesrl_trl.errors import DataError
from salesrl_trl.types import SalesRow

Record = dict[str, Any]
"""A row of a dataset as it is loaded."""
DEMO = "demo"
"""Name of the packaged dataset."""
_DEMO_FILES = {"train": "train.jsonl", "heldout": "heldout.jsonl"}
_LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def load_rows(source: str, split: str, branches: Sequence[str], limit: int | None = None) -> list[SalesRow]:
    """Load and check rows.

    Args:
        source (`str`):
            `"demo"`, a path to a `.jsonl`, `.json` or `.parquet` file, or the name of a dataset on the hub.
        split (`str`):
            Split to take: `"train"` or `"heldout"` for the demo. Ignored for a local file, which is one split.
        branches (`Sequence[str]`):
            The configured branch names.
        limit (`int`, *optional*):
            Number of rows to take, from the first one on. Defaults to all.

    Raises:
        `DataError`: there is no such source, it has no rows, a column is missing, or a row is malformed.
    """
    records, name = load_records(source, split)
    if limit is not None:
        records = records[:limit]
    if len(records) == 0:
        raise DataError(
            f"{name} is empty. Expected at least one row with the columns branch and conversation. "
            f"Check the path, the split and `max_*_rows`."
        )
    check_columns(records[0].keys(), name)
    return [parse_row(record, position, branches, name) for position, record in enumerate(records)]


def load_drafts() -> Iterator[tuple[SalesRow, list[dict[str, str]]]]:
    """The demo's training rows, with actions of annotators, some of them careless.

    Yields:
        `tuple[SalesRow, list[dict[str, str]]]`: a row and its draft actions, each a JSON action.
    """
    records = _with_documents(_read_jsonl(demo_path("train.jsonl")))
    drafts = {record["id"]: record["draft_actions"] for record in _read_jsonl(demo_path("drafts.jsonl"))}
    branches = sorted({record["branch"] for record in records})
    for position, record in enumerate(records):
        yield parse_row(record, position, branches, "the demo"), drafts[record["id"]]


def build_dataset(rows: Sequence[SalesRow], prompt: str | PromptTemplate, first_index: int = 0) -> Dataset:
    """The dataset for TRL: the prompt, and `row`, the row's number from `first_index` on, for the reward.

    `prompt` is a style or a template, as in `build_prompt`.
    """
    return prompt_dataset([build_prompt(row, prompt) for row in rows], first_index)


def prompt_dataset(prompts: Sequence[list[dict[str, str]]], first_index: int = 0) -> Dataset:
    """The dataset of `build_dataset`, from finished prompts.

    TRL passes all columns to its reward functions. With only these two, no other text of a customer can reach a log.
    """
    return Dataset.from_dict({"prompt": prompts, "row": list(range(first_index, first_index + len(prompts)))})


def is_file(source: str) -> bool:
    """Whether a source is a local file, by its ending. Such a file is one split."""
    return Path(source).suffix in _LOADERS


def check_source(source: str) -> None:
    """Raise `DataError` if a source is a local file that is not there."""
    path = Path(source).expanduser()
    if is_file(source) and not path.is_file():
        raise DataError(
            f"there is no dataset file {path}. Expected an existing {', '.join(_LOADERS)} file. "
            f"Correct the path, which is taken relative to {Path.cwd()}."
        )


def demo_path(name: str) -> Path:
    """A file of the packaged demo: `{knowledge,train,drafts,heldout}.jsonl` or `protected_terms.json`."""
    return Path(str(resources.files("salesrl_trl.data.demo") / name))


def load_records(source: str, split: str) -> tuple[list[Record], str]:
    """The rows of a source as they are, with all columns, and a name of the source for messages.

    Raises:
        `DataError`: there is no such source, or it can't be read.
    """
    if source == DEMO:
        if split not in _DEMO_FILES:
            raise DataError(f"the demo has no split {split!r}. Expected one of: {', '.join(_DEMO_FILES)}.")
        return _with_documents(_read_jsonl(demo_path(_DEMO_FILES[split]))), f"the demo's {split} split"
    if is_file(source):
        check_source(source)
        path = Path(source).expanduser()
        return _local_records(path), str(path)
    return _hub_records(source, split), f"{source} [{split}]"


def _local_records(path: Path) -> list[Record]:
    if path.stat().st_size == 0:
        return []
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    try:
        if path.suffix == ".json":
            path.read_text(encoding="utf-8-sig")
        return list(load_dataset(_LOADERS[path.suffix], data_files=str(path), split="train"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, {unreadable(error)}.") from None
    except Exception as error:  # the messages of pyarrow and pandas contain the file's text
        raise DataError(
            f"{path} can't be read as {path.suffix} ({type(error).__name__}). Expected rows with the same columns: "
            "docs/DATA.md shows one. Correct the file."
        ) from None


def _hub_records(name: str, split: str) -> list[Record]:
    try:
        return list(load_dataset(name, split=split))
    except (FileNotFoundError, ConnectionError, ValueError, OSError) as error:
        raise DataError(
            f"the dataset {name!r} could not be loaded with split {split!r} ({type(error).__name__}). Expected "
            f"'demo', a {', '.join(_LOADERS)} file, or a hub dataset that this machine can reach. Correct the name or "
            "the split."
        ) from error


def _read_jsonl(path: Path) -> list[Record]:
    records = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, line {number}: {unreadable(error).removeprefix('line 1, ')}.") from None
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number} is not JSON ({error.msg}, column {error.colno}). Expected one JSON object "
                    "a line."
                ) from None
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, or nesting as deep
                raise DataError(
                    f"{path}, line {number} can't be read ({type(error).__name__}). Expected one JSON object a line, "
                    "without numbers of thousands of digits or lists within lists as deep. Correct the line."
                ) from None
            if not isinstance(record, dict):
                raise DataError(
                    f"{path}, line {number} is a {type(record).__name__}. Expected one JSON object a line."
                )
            records.append(record)
    return records


def _with_documents(records: list[Record]) -> list[Record]:
    """Add to each demo record the texts of its documents."""
    texts = {document["id"]: document["text"] for document in _read_jsonl(demo_path("knowledge.jsonl"))}
    return [{**record, "documents": [texts[id_] for id_ in record["document_ids"]]} for record in records]
