"""Reads records: their tables, and the values of completions.

Defines which files belong to a run, how to open one, and how columns map to values. Replay, rejudge and the viewer
read records through it. A record has one SQLite file per rank in the run's folder `record`. Other tools may read them:
`PRAGMA user_version` is `VERSION`, and columns (`tables.sql`) keep their meaning within a version.

- `completions`: one row per completion, in the order in which batches were trained on or evaluated.
- `verdicts`: one row per judge's rubric, and per reward function or logged column with more than a number.
- `calls`: all requests for a completion, including hedges and retries. References requested ahead have a null
  completion; a request for a whole group or batch has a row per completion. Tool calls are stored as `tool_<name>`,
  with arguments, result, and the turn as the path.
- `texts`: long or repeated texts (prompts, answers, contents of calls), each stored once as zlib-compressed UTF-8.
- `meta`: facts about the run. `run` is its id, shared by all ranks and resumes. `weights` is a JSON object with the
  weights of several reward functions. `order ID`, for the training batch whose first completion has this id, is a
  `rollout.in_flight.Order` as a JSON list.
"""

import datetime
import decimal
import gzip
import hashlib
import json
import os
import re
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from salesrl_trl.errors import ConfigError
from salesrl_trl.names import RECORD_FOLDER
from salesrl_trl.telemetry.completion_record import Judged
from salesrl_trl.telemetry.logs import warn_once

VERSION = 2
SUFFIX = ".sqlite"

TABLES = Path(__file__).with_name("tables.sql").read_text(encoding="utf-8")


def record_file(run: Path, rank: int) -> Path:
    return run / RECORD_FOLDER / f"rank-{rank}{SUFFIX}"


def rank_of(path: Path) -> int | None:
    """The rank in a file's name; `None` for other names, e.g. a backup's."""
    match = re.fullmatch(rf"rank-(\d+){re.escape(SUFFIX)}", path.name)
    return None if match is None else int(match[1])


DAMAGED = (sqlite3.Error, zlib.error, ValueError)  # errors of reading a damaged or foreign file
LOCK_WAIT_S = 10.0  # longest wait for another process's lock
JSON_COLUMNS = ("action", "parts", "functions", "seconds")
TEXT_COLUMNS = ("prompt", "turns", "answer", "reference")  # columns that reference a JSON text by number


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A recorded completion: the columns of the table `completions` as values, and its verdicts."""

    id: int
    step: int
    mode: str
    batch: int
    prompt_group: int
    row: str
    branch: str
    text: str
    turns: list[dict[str, object]] | None
    digest: bytes
    action: Mapping[str, str] | None
    answer: object
    reference: object  # JSON values of both endpoints' answers
    outcome: str
    reason: str
    reward: float | None
    reference_reward: float | None
    advantage: float | None
    parts: Mapping[str, float | None]
    functions: Mapping[str, float | None]
    seconds: Mapping[str, float]
    verdicts: Mapping[str, Judged]


def digest_of(prompt: object, written: object) -> bytes:
    """A completion's key: 16 bytes from its prompt and its text or turns, as JSON values."""
    return digest(as_json([prompt, written], sort_keys=True))


def row_of(columns: object) -> str:
    """The name of a row without an id, derived from its columns."""
    return digest(as_json(columns, sort_keys=True)).hex()[:12]


def digest(text: str) -> bytes:
    """A text's key: 16 bytes."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def as_json(value: object, *, sort_keys: bool = False) -> str:
    """Compact JSON. Dates become text; other unsupported values become their type and a hash of their bytes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys, default=_stand_in)


def _stand_in(unknown: object) -> str:
    name = type(unknown).__name__
    if isinstance(unknown, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
        return f"<{name} {unknown}>"
    array = unknown.numpy() if hasattr(unknown, "numpy") else unknown  # a tensor
    content = array if isinstance(array, bytes) else getattr(array, "tobytes", bytes)()
    return f"<{name} {hashlib.blake2b(content, digest_size=8).hexdigest()}>" if content else f"<{name}>"


def record_files(run: Path) -> list[Path]:
    """The files of a run's record, by rank. Files of another run in the same folder are skipped with a warning. `run`
    is the run's output folder, the record's folder, or a single file."""
    if run.is_file():
        return [run]
    folder = run / RECORD_FOLDER if (run / RECORD_FOLDER).is_dir() else run
    ranks = {path: rank for path in folder.glob(f"*{SUFFIX}") if (rank := rank_of(path)) is not None}
    files = sorted(ranks, key=ranks.__getitem__)
    owner = run_of(files[0]) if files else None  # every run has a rank 0
    others = [path for path in files if None not in (owner, run_id := run_of(path)) and run_id != owner]
    if others:
        names = ", ".join(path.name for path in others)
        warn_once(f"[Record] skipping {names} in {folder}: from an earlier run than {files[0].name}")
    return [path for path in files if path not in others]


def run_of(path: Path) -> str | None:
    """The id of a file's run; empty without an id, or for another version. `None` if currently unreadable."""
    try:
        with closing(sqlite3.connect(address(path), timeout=LOCK_WAIT_S, uri=True)) as file:
            row = file.execute("SELECT value FROM meta WHERE name = 'run'").fetchone()
            is_read = file.execute("PRAGMA user_version").fetchone()[0] == VERSION
    except (sqlite3.Error, OSError):
        return None
    return str(row[0]) if row is not None and is_read else ""


def address(path: Path) -> str:
    """A read-only SQLite URI. If the folder is read-only and nobody writes the file, it is marked immutable, because
    SQLite would otherwise create a file for readers."""
    still = not path.with_name(f"{path.name}-wal").exists() and not os.access(path.parent, os.W_OK)
    return f"{path.resolve().as_uri()}?{'immutable=1' if still else 'mode=ro'}"


def open_record(path: Path) -> sqlite3.Connection:
    """Open a file read-only for any thread. Raises `ConfigError` if it is not a record or has another version."""
    try:
        if path.suffix == ".gz":  # a compressed record
            file = sqlite3.connect(":memory:", check_same_thread=False)
            file.deserialize(gzip.decompress(path.read_bytes()))
        else:
            file = sqlite3.connect(address(path), uri=True, timeout=LOCK_WAIT_S, check_same_thread=False)
        version = file.execute("PRAGMA user_version").fetchone()[0]
    except (*DAMAGED, OSError, EOFError, MemoryError) as error:  # `MemoryError`: an empty compressed file
        raise ConfigError(f"{path} can't be read as a record ({error}).") from None
    if version != VERSION:
        file.close()
        raise ConfigError(f"{path} is a record of version {version}. Use the release that wrote it.")
    file.row_factory = sqlite3.Row
    return file


def recorded(run: Path, mode: str | None = None) -> Iterator[Recorded]:
    """All completions of a run, or of one `mode`, rank by rank. Raises `ConfigError` without a record."""
    files = record_files(run)
    if not files:
        raise ConfigError(f"{run} lacks a record. Expected {record_file(run, 0)}, from a run with `record: true`.")
    columns = ", ".join(field.name for field in fields(Recorded) if field.name != "verdicts")
    query = f"SELECT {columns} FROM completions WHERE ? IN (mode, '') ORDER BY id"
    for path in files:
        with closing(open_record(path)) as file:
            try:
                for row in file.execute(query, (mode or "",)):
                    yield Recorded(**values_of(file, row))
            except DAMAGED as error:
                raise ConfigError(f"{path} can't be read as a record ({error}).") from None


def values_of(file: sqlite3.Connection, row: sqlite3.Row, parse_constant: type[str] | None = None) -> dict[str, Any]:
    """A completion's columns by name, with JSON and texts as values, and its `verdicts` by rubric. `parse_constant`
    converts constants outside JSON, such as NaN."""
    values = dict(row)
    for name in values.keys() & {*TEXT_COLUMNS, *JSON_COLUMNS}:
        text = text_of(file, row[name]) if name in TEXT_COLUMNS and row[name] is not None else row[name]
        values[name] = None if text is None else json.loads(text, parse_constant=parse_constant)
    names = [field.name for field in fields(Judged)]
    verdicts = file.execute(f"SELECT rubric, {', '.join(names)} FROM verdicts WHERE completion = ?", (row["id"],))
    values["verdicts"] = {rubric: Judged(**dict(zip(names, said, strict=True))) for rubric, *said in verdicts}
    return values


def text_of(file: sqlite3.Connection, number: int) -> str | None:
    """A text by its number; `None` if the writer has just dropped it."""
    row = file.execute("SELECT body FROM texts WHERE id = ?", (number,)).fetchone()
    return None if row is None else unpacked(row[0])


def unpacked(body: bytes) -> str:
    """Decompress a text of the table `texts`."""
    return zlib.decompress(body).decode(errors="replace")
