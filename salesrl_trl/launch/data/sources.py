"""Loads rows from the built-in demo, local files or the Hugging Face hub, and builds the dataset for TRL."""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset, Image, List, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetsError

from salesrl_trl.data import files
from salesrl_trl.data.branches import TAKEN, check_not_taken
from salesrl_trl.data.files import ENDINGS, FILES, Placed, Record, demo_records, read_file
from salesrl_trl.data.rows import check_columns, parse_row, shape
from salesrl_trl.errors import DataError, nearest
from salesrl_trl.ground.texts import encodable
from salesrl_trl.launch.data.form import Form, Portion, Records, converted, part_of
from salesrl_trl.launch.data.prompts import PromptTemplate, build_prompt
from salesrl_trl.types import Prompt, SalesRow

PACKAGED = (
    files.DEMO, files.DEMO_PICTURES, files.ARITHMETIC, files.DEMO_BBQ, files.DEMO_HALUEVAL, files.DEMO_SEARCH,
    files.DEMO_DIALOGUE,
)  # fmt: skip
PLAIN = Form()  # all rows, in this package's columns


def load_rows(
    source: str, split: str, branches: Sequence[str] = (), limit: int | None = None, form: Form = PLAIN,
    part: Portion = Portion.ALL,
) -> list[SalesRow]:  # fmt: skip
    """Load and check rows.

    Args:
        source (`str`):
            `"demo"`, `"demo_pictures"`, `"arithmetic"`, a path to a `.jsonl`, `.json` or `.parquet` file, or the name
            of a dataset on the hub.
        split (`str`):
            Split to load: `"train"` or `"heldout"` for the demo. Ignored for a local file, which is one split.
        branches (`Sequence[str]`, *optional*):
            The configured branch names. Defaults to any.
        limit (`int`, *optional*):
            Load only the first rows. Defaults to all.
        form (`Form`, *optional*):
            Format and columns of the source. Defaults to this package's columns.
        part (`Portion`, *optional*, defaults to `Portion.ALL`):
            The rows to train on or to hold out, by the form's share.

    Raises:
        `DataError`: the source does not exist or is empty, lacks a column, or has a malformed row.
    """
    return check_rows(part_of(load_records(source, split, form), form, part), branches, limit)


def check_rows(loaded: Records, branches: Sequence[str], limit: int | None = None) -> list[SalesRow]:
    """The rows of records. Arguments and errors as in `load_rows`."""
    rows = loaded.rows[:limit]
    if not rows:
        state = f"{loaded.name} is empty{f' ({loaded.note})' if loaded.note else ''}"
        raise DataError(f"{state}. Expected at least one row with the column prompt or conversation.")
    check_columns(rows[0].record.keys(), loaded.name, branches)
    name, where = loaded.name, (loaded.folder, loaded.row_name)
    return [parse_row(row.record, row.position, branches, name, row.line, *where) for row in rows]


def load_drafts() -> Iterator[tuple[SalesRow, list[dict[str, str]]]]:
    """The demo's training rows, each with draft actions of annotators of varying quality."""
    records = _with_documents(demo_records("train.jsonl"))
    drafts = {record["id"]: record["draft_actions"] for record in demo_records("drafts.jsonl")}
    branches = sorted({record["branch"] for record in records})
    for position, record in enumerate(records):
        yield parse_row(record, position, branches, "the demo"), drafts[record["id"]]


def build_dataset(rows: Sequence[SalesRow], prompt: str | PromptTemplate | None, first_index: int = 0) -> Dataset:
    """The dataset for TRL: the prompt, the row's branch and id, and for the reward `row`, its number counted from
    `first_index`. `prompt` is a style, a template or `None`, as in `build_prompt`."""
    return prompt_dataset([build_prompt(row, prompt) for row in rows], rows, first_index)


def prompt_dataset(
    prompts: Sequence[Prompt], rows_of: Sequence[SalesRow], first_index: int = 0, *, for_functions: bool = False
) -> Dataset:
    """The dataset of `build_dataset`, from built prompts and their rows, with pictures if any row has some. With
    `for_functions`, it includes the columns for a user's reward functions: `conversation` (a list of messages),
    `documents`, and all other columns of the source. Without, no other customer text passes through the trainer."""
    images = [row.images for row in rows_of]
    columns: dict[str, list[object]] = {
        "row": list(range(first_index, first_index + len(prompts))),
        "branch": [row.branch for row in rows_of],
        "id": [row.row_id for row in rows_of],
    }
    if for_functions:
        every = [columns_of(row) for row in rows_of]
        gaps: dict[str, list[str]] = {"conversation": [], "documents": []}
        further = dict.fromkeys(name for row in every for name in row)
        check_not_taken({*further}, {"row", *TAKEN})
        columns = {name: [row.get(name, gaps.get(name)) for row in every] for name in further} | columns
    rows = _table({"prompt": [*prompts], **columns}, rows_of)
    if not any(images):
        return rows
    shown = [[{"path": picture.path or None, "bytes": picture.content} for picture in pictures] for pictures in images]
    return rows.add_column("images", shown, feature=List(Image(mode="RGB")))  # read when a row is asked for


def _table(columns: dict[str, list[object]], rows: Sequence[SalesRow]) -> Dataset:
    """The columns of these rows as a dataset. Raises `DataError` for a column of mixed types, with the first row that
    differs."""
    made = {name: _column(name, encodable(values, f"the column `{name}`")) for name, values in columns.items()}
    for name in (name for name, column in made.items() if column is None):
        values = columns[name]
        place = bisect.bisect(range(1, len(values)), False, key=lambda count: _column(name, values[:count]) is None)
        row, before = rows[place], next((value for value in values if value is not None), None)
        is_large = _column(name, values[place : place + 1]) is None
        fault = "an integer beyond 64 bits" if is_large else shape(values[place])
        where = f"row {row.row_id!r}{'' if row.line is None else f' (line {row.line} of its file)'}"
        found = f"the column `{name}` has {fault}, and an earlier row {shape(before)}"
        raise DataError(f"{where}: {found}. Expected one type in all rows, including nested fields.")
    return concatenate_datasets([*made.values()], axis=1)


def _column(name: str, values: Sequence[object]) -> Dataset | None:
    """A dataset with one column; `None` if its values have mixed types."""
    try:
        return Dataset.from_dict({name: values})
    except (pa.ArrowException, OverflowError, TypeError, ValueError, RecursionError):  # may quote the values
        return None


def columns_of(row: SalesRow) -> dict[str, object]:
    """The columns of a row for reward functions, without its prompt."""
    texts = {"conversation": [asdict(message) for message in row.conversation], "documents": list(row.documents)}
    given = {name: value for name, value in texts.items() if value}
    return {**row.columns, **given, "branch": row.branch, "id": row.row_id}


def is_file(source: str) -> bool:
    """Whether a source is a local file, by its extension."""
    return Path(source).suffix in ENDINGS


def check_source(source: str) -> None:
    """Raise `DataError` for a local file that does not exist."""
    path = Path(source).expanduser()
    if is_file(source) and not path.is_file():
        beside = [file.name for file in path.parent.glob("*") if is_file(file.name) and file.is_file()]
        found = " It is a folder or a device." if path.exists() else nearest(path.name, beside)
        expected = f"Expected a {', '.join(ENDINGS)} file, relative to {Path.cwd()}."
        raise DataError(f"there is no dataset file {path}.{found} {expected}")


def load_records(source: str, split: str, form: Form = PLAIN) -> Records:
    """The records of a source in this package's columns. Raises `DataError` if it does not exist or is malformed."""
    folder: Path | None = None
    name = f"{source} [{split}]"
    if source in PACKAGED and split not in FILES:
        raise DataError(f"{source!r} lacks the split {split!r}. Expected one of: {', '.join(FILES)}.")
    if source == files.DEMO:
        placed = [Placed(record) for record in _with_documents(demo_records(FILES[split]))]
        name = f"the demo's {split} split"
    elif source == files.DEMO_PICTURES:
        folder, name = files.DEMO_PICTURES_FOLDER, f"the {split} split of the demo with pictures"
        if not folder.is_dir():
            raise DataError(f"{folder} does not exist. Run scripts/demo_pictures.py first.")
        placed = read_file(folder / FILES[split])
    elif source in PACKAGED:
        placed = [Placed(record) for record in demo_records(f"{source}/{FILES[split]}")]
    elif is_file(source):
        check_source(source)
        path = Path(source).expanduser()
        placed, name, folder = read_file(path), str(path), path.parent
    else:
        try:
            placed = [Placed(record) for record in load_dataset(source, split=split)]
        except (FileNotFoundError, ConnectionError, ValueError, OSError, DatasetsError) as error:
            found = f"the dataset {source!r} could not be loaded with split {split!r} ({type(error).__name__})"
            expected = f"Expected 'demo', a {', '.join(ENDINGS)} file, or a reachable hub dataset."
            raise DataError(f"{found}. {expected}") from error
    return converted(placed, name, form, folder)


def _with_documents(records: list[Record]) -> list[Record]:
    texts = {document["id"]: document["text"] for document in demo_records("knowledge.jsonl")}
    return [{**record, "documents": [texts[id_] for id_ in record["document_ids"]]} for record in records]
