"""What the lists need of every completion of some runs, kept up with files that grow.

Owns a table of its own, in a temporary database without a name: the runs' files are only read, and have no index by
reward or outcome. Owns which file and row a completion's id means. The table has no text but short codes; what was
said lies in two haystacks.
"""

import json
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from salesrl_trl.errors import ConfigError
from salesrl_trl.recording.reader import address, record_files
from salesrl_trl.recording.schema import VERSION, rank_of
from salesrl_trl.view.haystack import Haystack

CHUNK = 4000
"""Rows that are read in one go. A question waits no longer than for that."""
CACHE_KIB = 65_536

_COPIED = ("step", "mode", "batch", "place", "prompt_group", "row", "branch", "outcome", "reason", "provider",
           "reward", "reference_reward", "advantage", "judge_s", "tokens", "staleness", "time")  # fmt: skip
_TABLES = f"""
CREATE TABLE completions (
    n INTEGER PRIMARY KEY AUTOINCREMENT, run, rank, id, {", ".join(_COPIED)}, disagreement REAL, prompt
);
CREATE INDEX by_row ON completions (row, step);
CREATE TABLE prompts (run INTEGER, rank INTEGER, id INTEGER, n INTEGER, PRIMARY KEY (run, rank, id)) WITHOUT ROWID;
"""
# A number is never given twice: the n-th completion has the text n - 1 of the haystack.
_COPY = f"""
INSERT INTO completions
SELECT NULL, :run, :rank, c.id, {", ".join(f"c.{name}" for name in _COPIED)},
    coalesce((SELECT max(abs(candidate - reference)) FROM source.verdicts WHERE completion = c.id),
             abs(c.reward - c.reference_reward)),
    (SELECT n FROM prompts WHERE run = :run AND rank = :rank AND id = c.prompt)
FROM source.completions c
WHERE c.id > :last AND c.id <= :upto ORDER BY c.id
"""
_TEXTS = """
SELECT c.id, c.text, c.time, c.prompt,
    (SELECT group_concat(reason, char(10)) FROM source.verdicts WHERE completion = c.id) AS told
FROM source.completions c WHERE c.id > ? ORDER BY c.id LIMIT ?
"""


@dataclass(slots=True)
class Source:
    """One rank's file."""

    run: int
    """Number of the run among those that are looked at, from 0."""
    rank: int
    path: Path
    last: int = 0
    """Id of the last completion that was read."""
    mark: float = 0.0
    """Its time: another one means that the file was written anew."""
    dropped: str = ""
    """The last step that its writer has taken out of it, to keep to its size."""


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that can't write, with rows by name."""
    with closing(sqlite3.connect(address(path), uri=True, timeout=10)) as file:
        file.row_factory = sqlite3.Row
        yield file


def unpacked(body: bytes) -> str:
    """A text of the table `texts`."""
    return zlib.decompress(body).decode("utf-8", "replace")


def messages(prompt: str) -> list[dict[str, str]]:
    """A prompt as messages. One that is a text is a message of the user."""
    value = json.loads(prompt)
    if not isinstance(value, list):
        return [{"role": "user", "content": str(value)}]
    parts = [each if isinstance(each, dict) else {"content": each} for each in value]
    return [{"role": str(each.get("role", "")), "content": _plain(each.get("content"))} for each in parts]


def _plain(content: object) -> str:
    """A message's content. Of a list of parts, the texts; other parts by their names."""
    if isinstance(content, list):
        return "\n".join(str(each.get("text", f"[{each.get('type')}]")) for each in content if isinstance(each, dict))
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


class Index:
    """The completions of some runs. Threads may share it: what touches `db` or the haystacks holds `lock`.

    Args:
        runs (`list[Path]`):
            Their folders.

    Raises:
        ConfigError: a folder has no record, or one that was written by another version.
    """

    def __init__(self, runs: list[Path]) -> None:
        for run in runs:
            if not record_files(run):
                raise ConfigError(
                    f"{run} holds no record of completions. Expected the output folder of a run that records: it has "
                    "record/rank-0.sqlite."
                )
        self.runs = runs
        self._sources: dict[tuple[int, Path], Source] = {}
        for source in self._found():
            _check(source.path)
        self.lock = threading.RLock()
        self.texts, self.prompts = Haystack(), Haystack()
        self.version = 0
        """Rises with everything that is read."""
        self.reading = True
        """Whether there was more to read when it was last looked."""
        self.facets: tuple[int, dict[str, dict[str, int]]] = (-1, {})
        """What there is to choose from, and the version that it was counted at."""
        self.trouble = ""
        """Why the last look at the files failed."""
        self.db = sqlite3.connect("", uri=True, check_same_thread=False, isolation_level=None)
        self.db.row_factory = sqlite3.Row
        self.db.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
        self.db.execute("PRAGMA journal_mode=MEMORY")
        self.db.executescript(_TABLES)

    def close(self) -> None:
        """Give the temporary files back."""
        with self.lock:
            self.db.close()
            self.texts.close()
            self.prompts.close()

    def source(self, run: int, rank: int) -> Source:
        """The file of a run's rank. Raises `KeyError` where there is none."""
        for each in tuple(self._sources.values()):
            if (each.run, each.rank) == (run, rank):
                return each
        raise KeyError((run, rank))

    def refresh(self, is_over: Callable[[], bool] = lambda: False) -> int:
        """Read what is new in all files, until it is over. Returns the number of completions that were read."""
        read = 0
        for source in self._found():
            if _check(source.path):
                while not is_over() and (more := self._read(source)):
                    read += more
        self.reading = False
        return read

    def _found(self) -> list[Source]:
        """The files as they are now. What was read from one that is no longer the run's is forgotten."""
        found = [(number, path) for number, run in enumerate(self.runs) for path in record_files(run)]
        for gone in [each for each in self._sources if each not in found]:
            with self.lock:
                self._forget(self._sources.pop(gone))
        for number, path in found:
            self._sources.setdefault((number, path), Source(run=number, rank=rank_of(path) or 0, path=path))
        return list(self._sources.values())

    def _read(self, source: Source) -> int:
        """Read the next rows of one file. They stay together: a question sees all of them or none."""
        with self.lock:
            self.db.execute("ATTACH ? AS source", (address(source.path),))
            try:
                with self._together(source):
                    if self._is_another(source):
                        self._forget(source)
                    self._forget_dropped(source)
                    rows = self.db.execute(_TEXTS, (source.last, CHUNK)).fetchall()
                    if rows:
                        self._take(source, rows)
            finally:
                self.db.execute("DETACH source")
        return len(rows)

    @contextmanager
    def _together(self, source: Source) -> Iterator[None]:
        """Inside the block, what its writer does to a file is not seen. What fails leaves the index as it was."""
        before = source.last, source.mark, source.dropped
        self.db.execute("BEGIN")
        try:
            yield
        except BaseException:
            self.db.execute("ROLLBACK")
            source.last, source.mark, source.dropped = before
            raise
        self.db.execute("COMMIT")

    def _is_another(self, source: Source) -> bool:
        if not source.last:
            return False
        row = self.db.execute("SELECT time FROM source.completions WHERE id = ?", (source.last,)).fetchone()
        return row is None or row["time"] != source.mark

    def _forget(self, source: Source) -> None:
        whose = (source.run, source.rank)
        self.db.execute("DELETE FROM completions WHERE run = ? AND rank = ?", whose)
        self.db.execute("DELETE FROM prompts WHERE run = ? AND rank = ?", whose)
        source.last = 0
        self.version += 1

    def _forget_dropped(self, source: Source) -> None:
        row = self.db.execute("SELECT value FROM source.meta WHERE name = 'dropped_up_to_step'").fetchone()
        if row is not None and row["value"] != source.dropped:
            self.db.execute(
                "DELETE FROM completions WHERE run = ? AND rank = ? AND step <= ?",
                (source.run, source.rank, int(row["value"])),
            )
            source.dropped = row["value"]
            self.version += 1

    def _take(self, source: Source, rows: list[sqlite3.Row]) -> None:
        self._take_prompts(source, {row["prompt"] for row in rows})
        numbers = {"run": source.run, "rank": source.rank, "last": source.last, "upto": rows[-1]["id"]}
        self.db.execute(_COPY, numbers)
        self.texts.add(f"{row['text']}\n{row['told'] or ''}" for row in rows)
        source.last, source.mark = rows[-1]["id"], rows[-1]["time"]
        self.version += 1

    def _take_prompts(self, source: Source, wanted: set[int]) -> None:
        whose = (source.run, source.rank)
        known = {row["id"] for row in self.db.execute("SELECT id FROM prompts WHERE run = ? AND rank = ?", whose)}
        for prompt in sorted(wanted - known):
            (body,) = self.db.execute("SELECT body FROM source.texts WHERE id = ?", (prompt,)).fetchone()
            self.db.execute("INSERT INTO prompts VALUES (?, ?, ?, ?)", (*whose, prompt, len(self.prompts)))
            self.prompts.add(["\n".join(each["content"] for each in messages(unpacked(body)))])


def _check(path: Path) -> bool:
    """Whether a file has its tables. Its writer may have just made it."""
    with reading(path) as file:
        (version,) = file.execute("PRAGMA user_version").fetchone()
    if version not in (0, VERSION):
        raise ConfigError(f"{path} is a record of version {version}. This viewer reads version {VERSION}.")
    return bool(version)
