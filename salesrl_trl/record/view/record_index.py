"""What the viewer's lists need of every completion of some runs, kept up with files that grow.

Owns tables in a temporary database. The runs' files are only read, and have no index by reward or outcome.
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

CHUNK = 4000  # rows that are read in one go

_NAMED = re.compile(r"^-- name: (\w+)\n(.*?)(?=^-- name|\Z)", re.MULTILINE | re.DOTALL)
SQL = dict(_NAMED.findall((Path(__file__).parent / "assets" / "viewer.sql").read_text("utf-8")))  # statements by name


def messages(prompt: object) -> list[dict[str, object]]:
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
        for _, _, path in self._files():
            open_record(path).close()
        self.lock = threading.RLock()
        self.version = 0  # rises with everything that is read
        self.reading = True  # whether there was more to read when it was last looked
        self.facets: tuple[int, dict[str, dict[str, int]]] = (-1, {})  # what there is to choose from, at this version
        self.db = sqlite3.connect("", uri=True, check_same_thread=False, isolation_level=None)
        self.db.row_factory = sqlite3.Row
        self.db.create_function("lower_case", 1, str.lower, deterministic=True)  # SQLite's own knows ASCII alone
        self.db.execute("PRAGMA cache_size=-65536")
        self.db.execute("PRAGMA journal_mode=MEMORY")
        self.db.executescript(SQL["tables"])

    def close(self) -> None:
        with self.lock:
            self.db.close()

    def path(self, run: int, rank: int) -> Path:
        """The file of a run's rank. Raises `KeyError` where there is none."""
        return {(at, number): path for at, number, path in self._files()}[run, rank]

    def _files(self) -> list[tuple[int, int, Path]]:
        return [(at, rank_of(path) or 0, path) for at, run in enumerate(self.runs) for path in record_files(run)]

    def refresh(self, longest_s: float = math.inf) -> None:
        """Read what is new in all files, for about so long. A file that is no longer the run's is forgotten."""
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
        """Read the next rows of one file, if there are any. Inside of the transaction, what the file's writer does is
        not seen. What fails leaves the index as it was."""
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
        """The last id that was read. All of a file that was written anew is forgotten, and the steps that its writer
        has dropped."""
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
