"""What people wrote about completions: a flag and a note, in `record/notes.jsonl` beside the record of a run.

Owns that file. A line has the place of a completion and its time, so that a note is not shown for another completion
that a later run wrote in its place. Every change writes the file whole; lines that are no notes stay, because somebody
wrote them. The viewer calls it.
"""

import json
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from salesrl_trl.ground.process import make_private, write_whole
from salesrl_trl.record.reader import record_files

NOTES_FILE = "notes.jsonl"
FLAGS = ("good", "bad", "check")
MOST_NOTE_CHARS = 20_000
PLACE = ("rank", "id", "time")
Answer = dict[str, Any]


class Notes:
    """The notes of some runs, in the table `notes` of the viewer's database. Its callers hold the database's lock."""

    def __init__(self, db: sqlite3.Connection, runs: Sequence[Path]) -> None:
        self._db = db
        self._files = [record_files(run)[0].parent / NOTES_FILE for run in runs]
        self._seen: dict[int, tuple[int, int]] = {}  # time and size of each file when it was read

    def refresh(self) -> bool:
        """Read the files that have changed, for example by another viewer. Returns whether one had."""
        return sum(self._read(run) for run in range(len(self._files))) > 0

    def write(self, completion: sqlite3.Row, flag: str, note: str) -> None:
        """Keep a flag and a note of a completion; nothing is kept of two empty ones. Raises `ValueError` for a flag
        that is none, and for a note that is too long."""
        if flag not in ("", *FLAGS):
            raise ValueError(f"there is no flag {flag!r}")
        if len(note) > MOST_NOTE_CHARS:
            raise ValueError(f"a note has at most {MOST_NOTE_CHARS:,} characters")
        run, path = completion["run"], self._files[completion["run"]]
        place = {name: completion[name] for name in PLACE}
        known = ((line, _note(line) or {}) for line in _lines(path))
        lines = [line for line, old in known if any(old.get(name) != place[name] for name in ("rank", "id"))]
        if flag or note.strip():
            told = {name: completion[name] for name in ("step", "row")}
            written = {**place, **told, "flag": flag, "note": note.strip(), "written": round(time.time(), 3)}
            lines.append(json.dumps(written, ensure_ascii=False))
        make_private(path.with_suffix(".new"))  # which takes the file's place
        write_whole(path, "".join(f"{line}\n" for line in lines))
        self._read(run)

    def _read(self, run: int) -> bool:
        path = self._files[run]
        state = path.stat() if path.is_file() else None
        seen = (0, 0) if state is None else (state.st_mtime_ns, state.st_size)
        if self._seen.get(run, (0, 0)) == seen:
            return False
        self._db.execute("DELETE FROM notes WHERE run = ?", (run,))
        self._db.executemany(
            "INSERT OR REPLACE INTO notes VALUES (?, ?, ?, ?, ?, ?)",
            [
                (run, *(note[name] for name in PLACE), str(note.get("flag", "")), str(note.get("note", "")))
                for note in filter(None, map(_note, _lines(path)))
            ],
        )
        self._seen[run] = seen
        return True


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []


def _note(line: str) -> Answer | None:
    """The note of a line. `None` for one that is none: somebody wrote it by hand."""
    try:
        note = json.loads(line)
    except ValueError:
        return None
    is_note = isinstance(note, dict) and all(isinstance(note.get(name), int | float) for name in PLACE)
    return note if is_note else None
