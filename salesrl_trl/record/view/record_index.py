"""Index of the completions of some runs for the viewer's lists, updated as their files grow.

Owns tables in a temporary database, because the runs' files are read-only and lack indexes by reward or outcome.
"""

import json
import math
import re
import sqlite3
import threading
import time
from pathlib import Path

from salesrl_trl.data.files import nearest_file
from salesrl_trl.errors import ConfigError
from salesrl_trl.record.reader import address, open_record, rank_of, record_files, unpacked

CHUNK = 4000  # rows read at a time

_NAMED = re.compile(r"^-- name: (\w+)\n(.*?)(?=^-- name|\Z)", re.MULTILINE | re.DOTALL)
SQL = dict(_NAMED.findall((Path(__file__).parent / "assets" / "viewer.sql").read_text("utf-8")))  # statements by name


def messages(prompt: object) -> list[dict[str, object]]:
    """A prompt as messages. A plain text becomes a user message. Content parts other than texts are replaced by their
    type. `tool_calls` are unchanged."""
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
        shown.append(told | {name: message[name] for name in ("name", "tool_calls", "outcome") if message.get(name)})
    return shown


class Index:
    """The completions of runs in these folders. Threads may share it; access to `db` requires `lock`. Raises
    `ConfigError` for a folder without a record, or with a record of another version."""

    def __init__(self, runs: list[Path]) -> None:
        for run in runs:
            if not run.exists():
                raise ConfigError(f"{run} does not exist.{nearest_file(run)} Expected the output folder of a run.")
            if not record_files(run):
                raise ConfigError(
                    f"{run} does not contain a record of completions. Expected the output folder of a run with "
                    "`--record true`, which writes record/rank-0.sqlite."
                )
        self.runs = runs
        for _, _, path in self._files():
            open_record(path).close()
        self.lock = threading.RLock()
        self.version = 0  # increases with each change
        self.reading = True  # whether the last refresh left rows unread
        self.facets: tuple[int, dict[str, dict[str, int]]] = (-1, {})  # filter options, at this version
        self.db = sqlite3.connect("", uri=True, check_same_thread=False, isolation_level=None)
        self.db.row_factory = sqlite3.Row
        self.db.create_function("lower_case", 1, str.lower, deterministic=True)  # SQLite's own supports ASCII only
        self.db.execute("PRAGMA cache_size=-65536")
        self.db.execute("PRAGMA journal_mode=MEMORY")
        self.db.executescript(SQL["tables"])

    def close(self) -> None:
        with self.lock:
            self.db.close()

    def path(self, run: int, rank: int) -> Path:
        """The file of a run's rank. Raises `KeyError` if it does not exist."""
        return {(at, number): path for at, number, path in self._files()}[run, rank]

    def _files(self) -> list[tuple[int, int, Path]]:
        return [(at, rank_of(path) or 0, path) for at, run in enumerate(self.runs) for path in record_files(run)]

    def refresh(self, longest_s: float = math.inf) -> None:
        """Read new rows of all files, for about `longest_s`. Files that left their run are removed."""
        end_s = time.monotonic() + longest_s
        with self.lock:
            files = self._files()
            known = self.db.execute("SELECT DISTINCT run, rank FROM prompts").fetchall()
            for run, rank in {tuple(row) for row in known} - {(run, rank) for run, rank, _ in files}:
                self._forget(run, rank)
            for run, rank, path in files:
                while (more := self._read(run, rank, path)) and time.monotonic() < end_s:
                    pass
                if more:
                    return
            self.reading = False

    def _read(self, run: int, rank: int, path: Path) -> bool:
        """Read the next rows of one file, if any. The transaction isolates it from the file's writer; a failure leaves
        the index unchanged."""
        self.db.execute("ATTACH ? AS source", (address(path),))
        try:
            self.db.execute("BEGIN")
            last = self._last_kept(run, rank)
            rows = self.db.execute(
                "SELECT id, prompt FROM source.completions WHERE id > ? ORDER BY id LIMIT ?", (last, CHUNK)
            ).fetchall()
            if rows:
                self._take(run, rank, last, rows)
            self.db.execute("COMMIT")
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        finally:
            self.db.execute("DETACH source")
        return bool(rows)

    def _last_kept(self, run: int, rank: int) -> int:
        """The last id read. Removes steps that the writer dropped, and all rows of a rewritten file."""
        dropped = "(SELECT CAST(value AS INTEGER) FROM source.meta WHERE name = 'dropped_up_to_step')"
        of_file = "DELETE FROM completions WHERE run = ? AND rank = ?"
        self.version += self.db.execute(f"{of_file} AND step <= {dropped}", (run, rank)).rowcount
        known = "SELECT id, time FROM completions WHERE run = ? AND rank = ? ORDER BY n DESC LIMIT 1"
        last = self.db.execute(known, (run, rank)).fetchone()
        if last is None:
            return 0
        row = self.db.execute("SELECT time FROM source.completions WHERE id = ?", (last["id"],)).fetchone()
        if row is not None and row["time"] == last["time"]:
            return int(last["id"])
        self._forget(run, rank)
        return 0

    def _forget(self, run: int, rank: int) -> None:
        for table in ("completions", "prompts"):
            self.db.execute(f"DELETE FROM {table} WHERE run = ? AND rank = ?", (run, rank))
        self.version += 1

    def _take(self, run: int, rank: int, last: int, rows: list[sqlite3.Row]) -> None:
        numbers = {"run": run, "rank": rank, "last": last, "upto": rows[-1]["id"]}
        known = self.db.execute("SELECT id FROM prompts WHERE run = :run AND rank = :rank", numbers).fetchall()
        for prompt in {row["prompt"] for row in rows} - {row["id"] for row in known}:
            (body,) = self.db.execute("SELECT body FROM source.texts WHERE id = ?", (prompt,)).fetchone()
            text = "\n".join(str(message["content"]) for message in messages(json.loads(unpacked(body)))).lower()
            self.db.execute("INSERT INTO prompts VALUES (NULL, ?, ?, ?, ?)", (run, rank, prompt, text))
        (before,) = self.db.execute("SELECT coalesce(max(n), 0) FROM completions").fetchone()
        self.db.execute(SQL["copy"], numbers)
        self.db.execute(SQL["copy_texts"], {"before": before})
        self.version += 1
