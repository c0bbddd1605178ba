"""Where rows come from: the packaged demo, local files, the Hugging Face hub; and the dataset for TRL."""

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

PACKAGED = (files.DEMO, files.DEMO_PICTURES, files.ARITHMETIC, files.DEMO_BBQ, files.DEMO_HALUEVAL, files.DEMO_SEARCH)
PLAIN = Form()  # rows in this package's columns, all of them


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
            Split to take: `"train"` or `"heldout"` for the demo. Ignored for a local file, which is one split.
        branches (`Sequence[str]`, *optional*):
            The configured branch names. Any branch is taken when not given.
        limit (`int`, *optional*):
            Number of rows to take, from the first one on. Defaults to all.
        form (`Form`, *optional*):
            Format and columns of the source. Defaults to this package's columns.
        part (`Portion`, *optional*, defaults to `Portion.ALL`):
            The rows to train on or to hold out, by the form's share.

    Raises:
        `DataError`: there is no such source, it has no rows, a column is missing, or a row is malformed.
    """
    return check_rows(part_of(load_records(source, split, form), form, part), branches, limit)


def check_rows(loaded: Records, branches: Sequence[str], limit: int | None = None) -> list[SalesRow]:
    """The rows of some records. Arguments and errors are those of `load_rows`."""
    rows = loaded.rows[:limit]
    if not rows:
        raise DataError(
            f"{loaded.name} is empty{f' ({loaded.note})' if loaded.note else ''}. Expected at least one row with the "
            "column prompt or conversation. Check the path, the split and `max_*_rows`."
        )
    check_columns(rows[0].record.keys(), loaded.name, branches)
    return [
        parse_row(row.record, row.position, branches, loaded.name, row.line, loaded.folder, loaded.row_name)
        for row in rows
    ]


def load_drafts() -> Iterator[tuple[SalesRow, list[dict[str, str]]]]:
    """The demo's training rows, each with draft actions of annotators, some of whom were careless."""
    records = _with_documents(demo_records("train.jsonl"))
    drafts = {record["id"]: record["draft_actions"] for record in demo_records("drafts.jsonl")}
    branches = sorted({record["branch"] for record in records})
    for position, record in enumerate(records):
        yield parse_row(record, position, branches, "the demo"), drafts[record["id"]]


def build_dataset(rows: Sequence[SalesRow], prompt: str | PromptTemplate | None, first_index: int = 0) -> Dataset:
    """The dataset for TRL: the prompt, the row's branch and id, and `row`, its number from `first_index` on, for the
    reward. `prompt` is a style, a template or `None`, as in `build_prompt`."""
    return prompt_dataset([build_prompt(row, prompt) for row in rows], rows, first_index)


def prompt_dataset(
    prompts: Sequence[Prompt], rows_of: Sequence[SalesRow], first_index: int = 0, *, for_functions: bool = False
) -> Dataset:
    """The dataset of `build_dataset`, from finished prompts and their rows. It has pictures if any row has some. With
    `for_functions` it has what reward functions of a user's own may ask for: `conversation` (a list of messages),
    `documents`, and every further column of the source. Without, no other text of a customer travels through the
    trainer."""
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
    """The columns of these rows as a dataset. Raises `DataError` for one that does not fit, with its first row of
    another kind."""
    made = {name: _column(name, encodable(values, f"the column `{name}`")) for name, values in columns.items()}
    for name in (name for name, column in made.items() if column is None):
        values = columns[name]
        place = bisect.bisect(range(1, len(values)), False, key=lambda count: _column(name, values[:count]) is None)
        row, before = rows[place], next((value for value in values if value is not None), None)
        fault = (
            "an integer beyond 64 bits" if _column(name, values[place : place + 1]) is None else shape(values[place])
        )
        raise DataError(
            f"row {row.row_id!r}{'' if row.line is None else f' (line {row.line} of its file)'}: the column `{name}` "
            f"has {fault}, and an earlier row {shape(before)}. Expected one kind in all rows, also inside of objects, "
            "and integers of 64 bits. Correct the row, or leave the column out."
        )
    return concatenate_datasets([*made.values()], axis=1)


def _column(name: str, values: Sequence[object]) -> Dataset | None:
    """A dataset of one column. `None` if its values do not fit into one."""
    try:
        return Dataset.from_dict({name: values})
    except (pa.ArrowException, OverflowError, TypeError, ValueError, RecursionError):  # may quote the values
        return None


def columns_of(row: SalesRow) -> dict[str, object]:
    """What a reward function may ask for of a row, beside its prompt."""
    texts: dict[str, object] = {}
    if row.conversation:
        texts["conversation"] = [asdict(message) for message in row.conversation]
    if row.documents:
        texts["documents"] = list(row.documents)
    return {**row.columns, **texts, "branch": row.branch, "id": row.row_id}


def is_file(source: str) -> bool:
    """Whether a source is a local file, by its ending. Such a file is one split."""
    return Path(source).suffix in ENDINGS


def check_source(source: str) -> None:
    """Raise `DataError` if a source is a local file that is not there."""
    path = Path(source).expanduser()
    if is_file(source) and not path.is_file():
        beside = [file.name for file in path.parent.glob("*") if is_file(file.name) and file.is_file()]
        found = " There is a folder, or a device, of this name." if path.exists() else nearest(path.name, beside)
        raise DataError(
            f"there is no dataset file {path}.{found} Expected an existing {', '.join(ENDINGS)} file. "
            f"Correct the path, which is taken relative to {Path.cwd()}."
        )


def load_records(source: str, split: str, form: Form = PLAIN) -> Records:
    """The records of a source in this package's columns. Raises `DataError` if it is none, or of another form."""
    folder: Path | None = None
    name = f"{source} [{split}]"
    if source in PACKAGED and split not in FILES:
        raise DataError(f"{source!r} has no split {split!r}. Expected one of: {', '.join(FILES)}.")
    if source == files.DEMO:
        placed = [Placed(record) for record in _with_documents(demo_records(FILES[split]))]
        name = f"the demo's {split} split"
    elif source == files.DEMO_PICTURES:
        folder, name = files.DEMO_PICTURES_FOLDER, f"the {split} split of the demo with pictures"
        if not folder.is_dir():
            raise DataError(f"there is no {folder} here. Expected it to be made before: scripts/demo_pictures.py.")
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
            raise DataError(
                f"the dataset {source!r} could not be loaded with split {split!r} ({type(error).__name__}). Expected "
                f"'demo', a {', '.join(ENDINGS)} file, or a hub dataset that this machine can reach. Correct the name "
                "or the split."
            ) from error
    return converted(placed, name, form, folder)


def _with_documents(records: list[Record]) -> list[Record]:
    texts = {document["id"]: document["text"] for document in demo_records("knowledge.jsonl")}
    return [{**record, "documents": [texts[id_] for id_ in record["document_ids"]]} for record in records]
