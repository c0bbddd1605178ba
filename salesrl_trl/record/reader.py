"""The tables of a record, and the way back from it: what a completion was given, and what it earned.

Owns which files are a run's, how one is opened, and what its columns mean as values. Replay, rejudge and the viewer
read records through it. It writes nothing. One SQLite file for each rank, in the folder `record` of a run. Others may
read them: `PRAGMA user_version` is `VERSION`, and a column (`tables.sql`) keeps its meaning within a version.

- `completions`: a row for each completion, in the order in which batches were trained on or evaluated.
- `verdicts`: what was said of it, one row for each rubric of a judge, and for each reward function, or column that it
  logged, that said more than a number.
- `calls`: the requests that were sent on its way, hedges and retries too. A request for a reference that was asked for
  ahead of its completions has no completion. A request for a whole group or batch has a row for each completion. Of a
  tool that a conversation called: `tool_` and its name, its arguments, its result, and the turn as the path.
- `texts`: what is long or repeats: prompts, answers, the content of calls. Each once, as zlib-compressed UTF-8.
- `meta`: facts of the run. `run` is its id, the same in the files of all ranks, and after a resume too. `weights` is a
  JSON object: the weight of each of several reward functions. `order ID`, of the training batch whose first completion
  has this id, is a `rollout.in_flight.Order` as a JSON list.
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
    """The rank of a file by its name. `None` where it has another name, such as that of a backup."""
    match = re.fullmatch(rf"rank-(\d+){re.escape(SUFFIX)}", path.name)
    return None if match is None else int(match[1])


DAMAGED = (sqlite3.Error, zlib.error, ValueError)  # what reading a file raises that is damaged, or another's
LOCK_WAIT_S = 10.0  # longest wait for a file that another process locks for a moment
JSON_COLUMNS = ("action", "parts", "functions", "seconds")
TEXT_COLUMNS = ("prompt", "turns", "answer", "reference")  # columns that hold the number of a text, which is JSON


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A recorded completion: columns of the table `completions` as values, with its verdicts."""

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
    """The key of a completion: 16 bytes from JSON values, its prompt and its text or turns."""
    return digest(as_json([prompt, written], sort_keys=True))


def row_of(columns: object) -> str:
    """The name of a row without an id: the same for the same columns, JSON values or pictures."""
    return digest(as_json(columns, sort_keys=True)).hex()[:12]


def digest(text: str) -> bytes:
    """The key of a text: 16 bytes."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def as_json(value: object, *, sort_keys: bool = False) -> str:
    """JSON without spaces. A date is its text; what JSON does not know, its type with a hash of its bytes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys, default=_stand_in)


def _stand_in(unknown: object) -> str:
    name = type(unknown).__name__
    if isinstance(unknown, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
        return f"<{name} {unknown}>"
    array = unknown.numpy() if hasattr(unknown, "numpy") else unknown  # of a tensor
    content = array if isinstance(array, bytes) else getattr(array, "tobytes", bytes)()
    return f"<{name} {hashlib.blake2b(content, digest_size=8).hexdigest()}>" if content else f"<{name}>"


def record_files(run: Path) -> list[Path]:
    """The files of a run's record, by rank. Those of another run in the same folder are left out, and named once.
    `run` is the output folder of the run, the folder of the record, or one file."""
    if run.is_file():
        return [run]
    folder = run / RECORD_FOLDER if (run / RECORD_FOLDER).is_dir() else run
    ranks = {path: rank for path in folder.glob(f"*{SUFFIX}") if (rank := rank_of(path)) is not None}
    files = sorted(ranks, key=ranks.__getitem__)
    owner = run_of(files[0]) if files else None  # every run has a rank 0
    others = [path for path in files if None not in (owner, run_id := run_of(path)) and run_id != owner]
    if others:
        names = ", ".join(path.name for path in others)
        warn_once(f"[Record] {names} in {folder}: of an earlier run than {files[0].name}, and left out")
    return [path for path in files if path not in others]


def run_of(path: Path) -> str | None:
    """The id of a file's run; empty without one, or in another version. `None` if it can't be read now."""
    try:
        with closing(sqlite3.connect(address(path), timeout=LOCK_WAIT_S, uri=True)) as file:
            row = file.execute("SELECT value FROM meta WHERE name = 'run'").fetchone()
            is_read = file.execute("PRAGMA user_version").fetchone()[0] == VERSION
    except (sqlite3.Error, OSError):
        return None
    return str(row[0]) if row is not None and is_read else ""


def address(path: Path) -> str:
    """SQLite's address of a file that is only read. Where nothing can be written beside it, and nobody writes it,
    SQLite is told so: it would want to make a file for its readers."""
    still = not path.with_name(f"{path.name}-wal").exists() and not os.access(path.parent, os.W_OK)
    return f"{path.resolve().as_uri()}?{'immutable=1' if still else 'mode=ro'}"


def open_record(path: Path) -> sqlite3.Connection:
    """One file for reading, by any thread. Raises `ConfigError` for one that is no record, or of another version."""
    try:
        if path.suffix == ".gz":  # for reading alone
            file = sqlite3.connect(":memory:", check_same_thread=False)
            file.deserialize(gzip.decompress(path.read_bytes()))
        else:
            file = sqlite3.connect(address(path), uri=True, timeout=LOCK_WAIT_S, check_same_thread=False)
        version = file.execute("PRAGMA user_version").fetchone()[0]
    except (*DAMAGED, OSError, EOFError, MemoryError) as error:  # `MemoryError`: a packed file that is empty
        raise ConfigError(f"{path} can't be read as a record ({error}).") from None
    if version != VERSION:
        file.close()
        raise ConfigError(f"{path} is a record of version {version}. Use the release that wrote it.")
    file.row_factory = sqlite3.Row
    return file


def recorded(run: Path, mode: str | None = None) -> Iterator[Recorded]:
    """All completions of a run or of one `mode`, rank by rank. Raises `ConfigError` without a record."""
    files = record_files(run)
    if not files:
        raise ConfigError(f"{run} has no record. Expected {record_file(run, 0)}: a run with `record: true` has it.")
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
    """The columns of a row of completions by name, JSON and texts as values, and its `verdicts` by rubric.
    `parse_constant` makes a value of what JSON has no number for, such as NaN."""
    values = dict(row)
    for name in values.keys() & {*TEXT_COLUMNS, *JSON_COLUMNS}:
        text = text_of(file, row[name]) if name in TEXT_COLUMNS and row[name] is not None else row[name]
        values[name] = None if text is None else json.loads(text, parse_constant=parse_constant)
    names = [field.name for field in fields(Judged)]
    verdicts = file.execute(f"SELECT rubric, {', '.join(names)} FROM verdicts WHERE completion = ?", (row["id"],))
    values["verdicts"] = {rubric: Judged(**dict(zip(names, said, strict=True))) for rubric, *said in verdicts}
    return values


def text_of(file: sqlite3.Connection, number: int) -> str | None:
    """A text by its number. `None` where its writer has just dropped it."""
    row = file.execute("SELECT body FROM texts WHERE id = ?", (number,)).fetchone()
    return None if row is None else unpacked(row[0])


def unpacked(body: bytes) -> str:
    """A text as the table `texts` holds it."""
    return zlib.decompress(body).decode(errors="replace")
