"""Writes the record in the background during training.

Batches are passed as plain values, which costs the caller little. Batches that exceed the disk's speed, or that can't
be written, are dropped and counted; training never waits for them.
"""

import logging
import queue
import sqlite3
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from salesrl_trl.ground.local_disk import LocalFile, is_remote
from salesrl_trl.ground.process import enter, here, make_private, put_aside
from salesrl_trl.ground.texts import encodable
from salesrl_trl.names import Stage
from salesrl_trl.record.reader import TABLES, VERSION, as_json, digest, digest_of, run_of
from salesrl_trl.telemetry.completion_record import QUEUE, Call, CompletionRecord
from salesrl_trl.types import Outcome, Reward

logger = logging.getLogger(__name__)

WAITING_BATCHES = 16  # most batches queued for the disk
PART_TO_KEEP = 0.9  # a full file drops its oldest steps until it uses this share of the limit
LOCK_WAIT_S = 600.0  # longest wait for another process's lock, e.g. a backup's, while batches queue
CLOSE_TIMEOUT_S = 30.0  # longest wait on close for pending batches
PLAIN_COLUMNS = ("row", "branch", "tokens", "place", "prompt_group", "staleness")  # copied from an `Entry`


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A scored completion."""

    row: str  # id of the dataset row, or `reader.row_of` its columns
    branch: str
    prompt: object  # a JSON value: a text, or messages
    text: str
    turns: Sequence[Mapping[str, object]] | None = None  # a conversation's messages
    tokens: int | None
    place: int
    prompt_group: int
    staleness: int = 0
    reward: Reward
    record: CompletionRecord | None


class Advantages(Protocol):
    """A tensor."""

    def tolist(self) -> list[float]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The completions of a generation batch, or part of an evaluation."""

    step: int
    mode: str  # `"train"` or `"eval"`
    number: int
    entries: Sequence[Entry]
    advantages: Advantages | None = None  # by place; read on the writer's thread, which may wait for a GPU
    calls: Sequence[Call] = ()  # calls without a completion
    order: object = None  # a JSON value: the order in which its parts were trained on, for a replay
    time: float = field(default_factory=time.time)


@dataclass(eq=False, repr=False)
class Recorder:
    """Writes one rank's record to `path`, a `reader.record_file`. Beyond `most_bytes` the oldest steps are dropped,
    which is logged once. `clean` is applied to every text. `meta` contains facts about the run but no secrets; `run`
    is its id, shared by all ranks. If the run resumes from a checkpoint at step `after`, its file continues without
    later steps, which `others`, the files of ranks that no longer exist, lose too. Any other existing file is renamed
    with a number.
    """

    path: Path
    _: KW_ONLY
    most_bytes: int | None = None
    clean: Callable[[str], str] | None = None
    meta: Mapping[str, str] = field(default_factory=dict)
    after: int | None = None
    others: Sequence[Path] = ()

    def __post_init__(self) -> None:
        self._was_evaluated = self.after is None
        self._has_dropped = False
        self._clean = self.clean or str
        self._queue: queue.Queue[Batch | None] = queue.Queue(WAITING_BATCHES)
        self._left_out = self._unfit = 0
        self._thread: threading.Thread | None = None

    def record(self, batch: Batch) -> None:
        """Queue a batch without waiting."""
        if self._thread is None:
            self._thread = threading.Thread(target=here().run, args=(self._work,), name="record", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(batch)
        except queue.Full:
            self._left_out += 1
            if self._left_out == 1:
                logger.warning(f"[Record] writing {self.path} is too slow: step {batch.step} is dropped")

    def close(self) -> None:
        """Write queued batches."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
            thread.join(CLOSE_TIMEOUT_S)
        except queue.Full:
            pass
        if thread.is_alive():
            logger.warning(f"[Record] {self.path} is incomplete: its disk does not respond, or it is locked")
        if self._left_out:
            logger.warning(f"[Record] {self._left_out} batches were dropped from {self.path}")
        if self._unfit:
            logger.warning(f"[Record] {self._unfit} unwritable entries were dropped from {self.path}")

    # On the writer's thread

    def _work(self) -> None:
        try:
            enter()  # the filter's devices
            is_new = self.after is None or run_of(self.path) not in (None, self.meta.get("run"))
            if is_new and is_remote(self.path.parent):  # on a local disk, `opened` does so
                put_aside(self.path)
            place = LocalFile(self.path)
            with closing(self._opened(place.file)) as file:
                while (batch := self._queue.get()) is not None:
                    self._take(file, batch)
                    place.copy(file)
                is_copied = place.copy(file, now=True)
            if is_copied:
                place.discard()
        except Exception as error:  # training must continue
            logger.warning(
                f"[Record] {self.path} can't be written ({type(error).__name__}: {error}). Training continues without "
                "a record."
            )
            while self._queue.get() is not None:  # further batches are dropped
                pass

    def _opened(self, file: Path) -> sqlite3.Connection:
        if self.after is not None:
            for path in self.others:
                try:
                    with closing(sqlite3.connect(path, LOCK_WAIT_S)) as other, other:
                        drop_after(other, self.after)
                except sqlite3.Error as error:
                    logger.warning(f"[Record] steps after {self.after} can't be deleted from {path} ({error})")
        return opened(file, self.meta, after=self.after)

    def _take(self, file: sqlite3.Connection, batch: Batch) -> None:
        before = _used_bytes(file)
        try:
            unfit = self._write(file, batch, None if batch.advantages is None else batch.advantages.tolist())
        except Exception as error:
            if is_of_the_file(error):
                raise
            unfit = [error] * len(batch.entries)
        if unfit and not self._unfit:
            # the message of an error, e.g. a filter's, may quote a customer
            place = traceback.extract_tb(unfit[0].__traceback__)[-1]
            logger.warning(
                f"[Record] an entry of step {batch.step} is dropped from {self.path}: {type(unfit[0]).__name__} at "
                f"{place.filename}:{place.lineno}. Further ones are counted"
            )
        self._unfit += len(unfit)
        if self.most_bytes is not None:
            self._make_room(file, self.most_bytes, 2 * (_used_bytes(file) - before))  # margin for larger batches

    def _write(self, file: sqlite3.Connection, batch: Batch, advantages: Sequence[float] | None) -> list[Exception]:
        """Write a batch. Returns the errors of unwritable entries."""
        unfit: list[Exception] = []
        with file:  # one transaction: a kill leaves a batch complete or absent
            file.execute("BEGIN IMMEDIATE")
            if not self._was_evaluated and batch.mode == "eval":  # the last step may be evaluated again
                drop(file, "mode = 'eval' AND step >= ?", batch.step)
            if batch.order is not None:
                first = "(SELECT coalesce(max(id), 0) + 1 FROM completions)"
                file.execute(f"INSERT OR REPLACE INTO meta VALUES ('order ' || {first}, ?)", [as_json(batch.order)])
            for entry in batch.entries:
                with _apart(file, unfit):
                    is_scored = entry.reward.value is not None
                    self._add(file, batch, entry, advantages[entry.place] if advantages and is_scored else None)
            for call in batch.calls:
                with _apart(file, unfit):
                    self._add_calls(file, None, [call])
        self._was_evaluated |= batch.mode == "eval"
        return unfit

    def _add(self, file: sqlite3.Connection, batch: Batch, entry: Entry, advantage: float | None) -> None:
        record, reward = entry.record or CompletionRecord(), entry.reward

        def text_of(value: object) -> int | None:
            return None if value is None else add_text(file, as_json(self._cleaned(value)))

        values = {name: getattr(entry, name) for name in PLAIN_COLUMNS}
        values |= {
            "step": batch.step,
            "mode": batch.mode,
            "batch": batch.number,
            "prompt": text_of(entry.prompt),
            "text": self._clean(entry.text),
            "turns": text_of(entry.turns),
            "digest": digest_of(entry.prompt, entry.turns or entry.text),
            "action": None if record.action is None else as_json(self._cleaned(record.action)),
            "answer": text_of(record.answer),
            "reference": text_of(record.reference),
            "advantage": advantage,
            "time": batch.time,
            "outcome": reward.outcome.value,
            "reason": "" if reward.outcome is Outcome.OK else reward.reason,  # its words are in the verdicts
            "reward": reward.value,
            "reference_reward": reward.reference_value,
            "parts": as_json(dict(reward.components)),
            "functions": as_json(dict(reward.by_function)),
            "seconds": as_json({**({QUEUE: record.queue_s} if record.queue_s > 0 else {}), **reward.seconds}),
            "provider": next((judged.provider or None for judged in record.verdicts.values()), None),
            "judge_s": reward.seconds.get(Stage.JUDGE),
        }
        completion = insert(file, "completions", values)
        for rubric, judged in record.verdicts.items():
            said = {**asdict(judged), "reason": self._clean(judged.reason)}
            insert(file, "verdicts", {"completion": completion, "rubric": rubric, **said})
        self._add_calls(file, completion, record.calls)

    def _add_calls(self, file: sqlite3.Connection, completion: int | None, calls: Sequence[Call]) -> None:
        for call in calls:
            values = asdict(call)
            for name in ("request", "answer"):
                if values[name]:
                    values[name] = add_text(file, self._clean(values[name].decode(errors="replace")))
            insert(file, "calls", {**values, "completion": completion})

    def _cleaned(self, value: object) -> object:
        if isinstance(value, str):
            return self._clean(value)
        if isinstance(value, Mapping):
            return {name: self._cleaned(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [self._cleaned(part) for part in value]
        return value

    def _make_room(self, file: sqlite3.Connection, most_bytes: int, for_next: int) -> None:
        """Drop the oldest steps if the file lacks room for another such batch. Their pages are reused."""
        if _used_bytes(file) + for_next <= most_bytes:
            return
        dropped = None
        while _used_bytes(file) > PART_TO_KEEP * most_bytes and (step := _drop_oldest(file)) is not None:
            dropped = step
        if dropped is not None and not self._has_dropped:
            self._has_dropped = True
            logger.warning(
                f"[Record] {self.path} has reached {most_bytes / 2**30:g} GiB (`gib` of `record`): from now on, the "
                f"oldest steps are dropped (so far up to {dropped})"
            )


@contextmanager
def _apart(file: sqlite3.Connection, unfit: list[Exception]) -> Iterator[None]:
    """Roll back only the block's writes if one of them fails."""
    file.execute("SAVEPOINT entry")
    try:
        yield
    except Exception as error:
        if is_of_the_file(error):
            raise
        file.execute("ROLLBACK TO entry")
        unfit.append(error)
    file.execute("RELEASE entry")


UNUSED_TEXTS = """
DELETE FROM texts WHERE id NOT IN (
    SELECT prompt FROM completions UNION SELECT answer FROM completions WHERE answer IS NOT NULL
    UNION SELECT reference FROM completions WHERE reference IS NOT NULL
    UNION SELECT turns FROM completions WHERE turns IS NOT NULL
    UNION SELECT request FROM calls WHERE request IS NOT NULL
    UNION SELECT answer FROM calls WHERE answer IS NOT NULL)
"""


def is_of_the_file(error: Exception) -> bool:
    """Whether an error concerns the file or the disk rather than a value."""
    of_values = (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError)
    return isinstance(error, sqlite3.Error) and not isinstance(error, of_values)


def drop(file: sqlite3.Connection, condition: str, *values: object) -> None:
    """Delete completions and everything only they reference."""
    for table in ("verdicts", "calls"):
        file.execute(f"DELETE FROM {table} WHERE completion IN (SELECT id FROM completions WHERE {condition})", values)
    if file.execute(f"DELETE FROM completions WHERE {condition}", values).rowcount:
        file.execute(UNUSED_TEXTS)


def drop_after(file: sqlite3.Connection, step: int) -> None:
    """Delete everything after a step, including calls without a completion."""
    last = "SELECT coalesce(max(time), 0) FROM completions WHERE step <= ?"
    file.execute(f"DELETE FROM calls WHERE completion IS NULL AND time > ({last})", (step,))
    drop(file, "step > ?", step)


def _drop_oldest(file: sqlite3.Connection) -> int | None:
    """Delete the oldest steps, about a tenth of the completions, with their other calls. Returns the last deleted
    step; `None` if only one step remains, which is kept."""
    [count, newest] = file.execute("SELECT count(*), max(step) FROM completions").fetchone()
    oldest = "SELECT max(step) FROM (SELECT step FROM completions WHERE step < ? ORDER BY step LIMIT ?)"
    [step] = file.execute(oldest, (newest, max(int(count * (1 - PART_TO_KEEP)), 1))).fetchone()
    if step is None:
        return None
    with file:
        file.execute("BEGIN IMMEDIATE")
        last = "SELECT max(time) FROM completions WHERE step <= ?"
        file.execute(f"DELETE FROM calls WHERE completion IS NULL AND time <= ({last})", (step,))
        drop(file, "step <= ?", step)
        file.execute("INSERT OR REPLACE INTO meta VALUES ('dropped_up_to_step', ?)", (str(step),))
    return int(step)


def opened(path: Path, meta: Mapping[str, str], *, after: int | None = None) -> sqlite3.Connection:
    """Open a file for writing, readable by its owner only. An existing file is renamed by `put_aside`, unless it
    belongs to this run, which resumes `after` a step: then later steps are deleted."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    run = meta.get("run", "")
    if after is None or run_of(path) not in (None, run):
        put_aside(*(path.with_name(f"{path.name}{end}") for end in ("", "-wal", "-shm", "-journal")))
    make_private(path)
    file = sqlite3.connect(path, LOCK_WAIT_S, isolation_level="DEFERRED", check_same_thread=False)
    try:
        file.execute("PRAGMA journal_mode = WAL")  # readers and the writer don't block each other
        file.execute("PRAGMA synchronous = NORMAL")  # intact after a kill; a power cut may lose the last steps
        file.execute("PRAGMA journal_size_limit = 16777216")  # shrink the journal after a large change
        if file.execute("PRAGMA user_version").fetchone()[0] != VERSION:
            file.executescript(f"BEGIN; {TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
        with file:
            file.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta.items())
            if after is not None:
                drop_after(file, after)
    except sqlite3.Error:
        file.close()
        raise
    return file


def _used_bytes(file: sqlite3.Connection) -> int:
    pragmas = "pragma_page_count(), pragma_freelist_count(), pragma_page_size()"
    [used] = file.execute(f"SELECT (page_count - freelist_count) * page_size FROM {pragmas}").fetchone()
    return int(used)


def insert(file: sqlite3.Connection, table: str, values: Mapping[str, object]) -> int:
    """Insert a row by column names. Returns its id."""
    names, places = ", ".join(values), ", ".join("?" * len(values))
    given = encodable([*values.values()], "a text for the record")
    number = file.execute(f"INSERT INTO {table} ({names}) VALUES ({places})", given).lastrowid
    assert number is not None
    return number


def add_text(file: sqlite3.Connection, text: str) -> int:
    """The id of a text, inserted if absent."""
    text = encodable(text, "a text for the record")
    key = digest(text)
    row = file.execute("SELECT id FROM texts WHERE digest = ?", (key,)).fetchone()
    return int(row[0]) if row else insert(file, "texts", {"digest": key, "body": zlib.compress(text.encode(), 1)})
