"""What the viewer's lists need of every completion of some runs, kept up with files that grow.

Owns tables in a temporary database, the search for a text, and which file and row an id means. The runs' files are
only read, and have no index by reward or outcome. `queries` asks it, the viewer's thread refreshes it.
"""

import json
import re
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from salesrl_trl.data.files import nearest_file
from salesrl_trl.errors import ConfigError
from salesrl_trl.record.reader import LOCK_WAIT_S, VERSION, address, rank_of, record_files, unpacked

CHUNK = 4000  # rows that are read in one go. A question waits no longer than for that.
CACHE_KIB = 65_536

_NAMED = re.compile(r"^-- name: (\w+)\n(.*?)(?=^-- name|\Z)", re.MULTILINE | re.DOTALL)
SQL = dict(_NAMED.findall((Path(__file__).parent / "assets" / "viewer.sql").read_text("utf-8")))  # statements by name


@dataclass(slots=True)
class Source:
    """One rank's file."""

    run: int  # number of the run among those that are looked at, from 0
    rank: int
    path: Path
    last: int = 0  # id of the last completion that was read
    last_time: float = 0.0  # its time: another one means that the file was written anew
    dropped: str = ""  # the last step that its writer has taken out of it, to keep to its size


def messages(prompt: object) -> list[dict[str, Any]]:
    """A prompt as messages. A text is the user's. Parts of a content that are no texts stand by their names. Calls of
    tools stay as they are, in `tool_calls`."""
    if not isinstance(prompt, list):
        return [{"role": "user", "content": str(prompt)}]
    shown = []
    for message in (part if isinstance(part, dict) else {"content": part} for part in prompt):
        content = message.get("content")
        if isinstance(content, list):
            parts = (part for part in content if isinstance(part, dict))
            content = "\n".join(str(part.get("text", f"[{part.get('type')}]")) for part in parts)
        if not isinstance(content, str):
            content = "" if content is None else json.dumps(content, ensure_ascii=False)
        told = {"role": str(message.get("role", "")), "content": content}
        shown.append(told | {name: message[name] for name in ("name", "tool_calls") if message.get(name)})
    return shown


class Index:
    """The completions of some runs, by their folders. Threads may share it: what touches `db` holds `lock`. Raises
    `ConfigError` for a folder without a record, or with one of another version."""

    def __init__(self, runs: list[Path]) -> None:
        for run in runs:
            if not run.exists():
                raise ConfigError(f"there is no {run}.{nearest_file(run)} Expected the output folder of a run.")
            if not record_files(run):
                raise ConfigError(
                    f"{run} holds no record of completions. Expected the output folder of a run that records: it has "
                    "record/rank-0.sqlite. A run with `--record true` writes it."
                )
        self.runs = runs
        self._sources: dict[tuple[int, Path], Source] = {}
        for source in self._current_sources():
            _has_tables(source.path)
        self.lock = threading.RLock()
        self.version = 0  # rises with everything that is read
        self.reading = True  # whether there was more to read when it was last looked
        self.facets: tuple[int, dict[str, dict[str, int]]] = (-1, {})  # what there is to choose from, at this version
        self.trouble = ""  # why the last look at the files failed
        self.db = sqlite3.connect("", uri=True, check_same_thread=False, isolation_level=None)
        self.db.row_factory = sqlite3.Row
        self.db.create_function("lower_case", 1, str.lower, deterministic=True)  # SQLite's own knows ASCII alone
        self.db.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
        self.db.execute("PRAGMA journal_mode=MEMORY")
        self.db.executescript(SQL["tables"])

    def close(self) -> None:
        with self.lock:
            self.db.close()

    def source(self, run: int, rank: int) -> Source:
        """The file of a run's rank. Raises `KeyError` where there is none."""
        for source in tuple(self._sources.values()):
            if (source.run, source.rank) == (run, rank):
                return source
        raise KeyError((run, rank))

    def refresh(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Read what is new in all files, until it is over."""
        for source in self._current_sources():
            if _has_tables(source.path):
                while not is_over() and self._read(source):
                    pass
        self.reading = False

    def _current_sources(self) -> list[Source]:
        """The files as they are now. What was read from one that is no longer the run's is forgotten."""
        files = [(number, path) for number, run in enumerate(self.runs) for path in record_files(run)]
        for gone in [key for key in self._sources if key not in files]:
            with self.lock:
                self._forget(self._sources.pop(gone))
        for number, path in files:
            self._sources.setdefault((number, path), Source(run=number, rank=rank_of(path) or 0, path=path))
        return list(self._sources.values())

    def _read(self, source: Source) -> bool:
        """Read the next rows of one file, if there are any. They stay together: a question sees all of them or none.
        Inside of the transaction, what the file's writer does is not seen. What fails leaves the index as it was."""
        before = source.last, source.last_time, source.dropped
        with self.lock:
            self.db.execute("ATTACH ? AS source", (address(source.path),))
            try:
                self.db.execute("BEGIN")
                self._forget_what_is_gone(source)
                rows = self.db.execute(
                    "SELECT id, time, prompt FROM source.completions WHERE id > ? ORDER BY id LIMIT ?",
                    (source.last, CHUNK),
                ).fetchall()
                if rows:
                    self._take(source, rows)
                self.db.execute("COMMIT")
            except BaseException:
                self.db.execute("ROLLBACK")
                source.last, source.last_time, source.dropped = before
                raise
            finally:
                self.db.execute("DETACH source")
        return bool(rows)

    def _forget_what_is_gone(self, source: Source) -> None:
        """All of a file that was written anew, and the steps that its writer has dropped."""
        row = self.db.execute("SELECT time FROM source.completions WHERE id = ?", (source.last,)).fetchone()
        if source.last and (row is None or row["time"] != source.last_time):
            self._forget(source)
        row = self.db.execute("SELECT value FROM source.meta WHERE name = 'dropped_up_to_step'").fetchone()
        if row is not None and row["value"] != source.dropped:
            self.db.execute(
                "DELETE FROM completions WHERE run = ? AND rank = ? AND step <= ?",
                (source.run, source.rank, int(row["value"])),
            )
            source.dropped = row["value"]
            self.version += 1

    def _forget(self, source: Source) -> None:
        for table in ("completions", "prompts"):
            self.db.execute(f"DELETE FROM {table} WHERE run = ? AND rank = ?", (source.run, source.rank))
        source.last = 0
        self.version += 1

    def _take(self, source: Source, rows: list[sqlite3.Row]) -> None:
        numbers = {"run": source.run, "rank": source.rank, "last": source.last, "upto": rows[-1]["id"]}
        known = self.db.execute("SELECT id FROM prompts WHERE run = :run AND rank = :rank", numbers).fetchall()
        for prompt in {row["prompt"] for row in rows} - {row["id"] for row in known}:
            (body,) = self.db.execute("SELECT body FROM source.texts WHERE id = ?", (prompt,)).fetchone()
            text = "\n".join(message["content"] for message in messages(json.loads(unpacked(body)))).lower()
            self.db.execute("INSERT INTO prompts VALUES (NULL, ?, ?, ?, ?)", (source.run, source.rank, prompt, text))
        (before,) = self.db.execute("SELECT coalesce(max(n), 0) FROM completions").fetchone()
        self.db.execute(SQL["copy"], numbers)
        self.db.execute(SQL["copy_texts"], {"before": before})
        source.last, source.last_time = rows[-1]["id"], rows[-1]["time"]
        self.version += 1


def _has_tables(path: Path) -> bool:
    """Whether a file has its tables. Its writer may have just made it."""
    with closing(sqlite3.connect(address(path), uri=True, timeout=LOCK_WAIT_S)) as file:
        (version,) = file.execute("PRAGMA user_version").fetchone()
    if version not in (0, VERSION):
        raise ConfigError(f"{path} is a record of version {version}. This viewer reads version {VERSION}.")
    return bool(version)
