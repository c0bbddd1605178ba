"""Whether reference answers that an earlier run kept still hold: the knowledge behind them may have changed since.

Owns the comparison of some of them with fresh ones, the answers that a difference deletes, and the lines about both.
"""

import asyncio
import json
import secrets
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import TypeVar

from salesrl_trl.errors import ServiceError
from salesrl_trl.reward.answer_store import AnswerStore
from salesrl_trl.reward.cache import cache_key
from salesrl_trl.reward.rag.client import answer_from_json
from salesrl_trl.types import Answer, SalesRow

T = TypeVar("T")

SAMPLES = 8
"""Kept answers that are asked for again. Several, because a changed document shows only in the rows about it."""
ATTEMPTS = 20
"""Attempts at a file that another process writes to, each `answer_file.LOCK_TIMEOUT_S` long."""


async def check_kept(
    references: AnswerStore,
    answers: AnswerStore,
    service: str,
    rows: Mapping[str, SalesRow],
    ask: Callable[[SalesRow], Awaitable[Answer]],
) -> list[tuple[str, bool]]:
    """Compare kept references with fresh ones. Forget all of this run's rows if one differs.

    Args:
        references (`AnswerStore`):
            32B answers, of all runs.
        answers (`AnswerStore`):
            8B answers and verdicts, of this run and process. They are forgotten if their references were: here, by
            another process or run, or by a person who deleted the file.
        service (`str`):
            The `identity` of the backend that answered.
        rows (`Mapping[str, SalesRow]`):
            The run's rows by the keys of their references.
        ask (`Callable[[SalesRow], Awaitable[Answer]]`):
            Asks for a fresh reference. Raises `ServiceError`.

    Returns:
        `list[tuple[str, bool]]`: lines for the log, each with whether it is a warning.
    """
    mark = cache_key("knowledge", service)
    lines = [await _compare(references, mark, rows, ask), await _follow(references, answers, mark)]
    return [each for each in lines if each is not None]


async def _compare(
    references: AnswerStore,
    mark: str,
    rows: Mapping[str, SalesRow],
    ask: Callable[[SalesRow], Awaitable[Answer]],
) -> tuple[str, bool] | None:
    seen = await references.use(lambda file: _value(file, mark))
    known = await references.use(lambda file: [key for key in rows if _value(file, key) is not None])
    if not known:
        return None
    written = datetime.fromtimestamp(references.path.stat().st_mtime) if references.path else datetime.now()
    place = f"the cache {references.path}, last written {written:%Y-%m-%d %H:%M}"
    share = f"{len(known):,} of {len(rows):,}"
    pairs = await asyncio.gather(
        *(_pair(references, key, rows[key], ask) for key in known[:: -(-len(known) // SAMPLES)])
    )
    compared = [pair for pair in pairs if pair is not None]
    changed = sum(_differ(*pair) for pair in compared)
    if not changed:
        found = (
            f"{len(compared)} of them were asked for again: they are the same"
            if compared
            else "none could be compared"
        )
        return (
            f"{share} references come from {place}; {found}. Delete the file when the knowledge base has changed",
            not compared,
        )

    def forget(file: sqlite3.Connection) -> bool:
        if _value(file, mark) == seen:  # else another process has forgotten them, and the file's are fresh
            file.executemany("DELETE FROM answers WHERE key = ?", [(key,) for key in (*known, mark)])
        return True

    done = "are forgotten and asked for anew"
    if not await _do_alone(references, forget):
        done = "could NOT be forgotten: stop, and delete the file"
    return (
        f"the knowledge behind the 32B endpoint has changed: {changed} of {len(compared)} references differ from "
        f"those in {place}. Its answers to this run's rows ({share}) {done}",
        True,
    )


async def _follow(references: AnswerStore, answers: AnswerStore, mark: str) -> tuple[str, bool] | None:
    """Forget answers that were kept beside other references.

    Both files hold a mark. The references' is deleted with them, and a new one is drawn. So answers whose mark differs
    were kept beside other references."""
    if references.path is None or answers.path is None:
        return None

    def marked(file: sqlite3.Connection) -> str:
        file.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (mark, json.dumps(secrets.token_hex(8))))
        return str(_value(file, mark))

    def forget(file: sqlite3.Connection) -> int:
        if _value(file, mark) == now:
            return 0
        count: int = file.execute("DELETE FROM answers").rowcount
        file.execute("INSERT INTO answers VALUES (?, ?)", (mark, now))
        return count

    now = await _do_alone(references, marked)
    gone = None if now is None else await _do_alone(answers, forget)
    if gone == 0:
        return None
    if gone is None:
        return f"whether {answers.path} was kept beside these references is not known: one can't be written", True
    return f"{gone:,} entries of {answers.path} were kept beside other references, and are forgotten", True


def _value(file: sqlite3.Connection, key: str) -> str | None:
    row = file.execute("SELECT value FROM answers WHERE key = ?", (key,)).fetchone()
    return None if row is None else row[0]


async def _pair(
    references: AnswerStore, key: str, row: SalesRow, ask: Callable[[SalesRow], Awaitable[Answer]]
) -> tuple[Answer, Answer] | None:
    """The kept answer and a fresh one; `None` where one of them can't be had."""
    try:
        return answer_from_json(await references.get(key)), await ask(row)
    except (ServiceError, ValueError, TypeError, KeyError):
        return None


def _differ(kept: Answer, fresh: Answer) -> bool:
    """Whether the passages differ. The words alone prove nothing: an endpoint that samples never repeats them."""
    return {(each.id, each.text) for each in kept.passages} != {(each.id, each.text) for each in fresh.passages}


async def _do_alone(store: AnswerStore, work: Callable[[sqlite3.Connection], T]) -> T | None:
    """Run `work` while no other process can change the file. Returns `None` if the file is locked for long, or
    broken."""

    def alone(file: sqlite3.Connection) -> T:
        file.execute("BEGIN IMMEDIATE")
        with file:  # commits, or rolls back after an error
            return work(file)

    for _ in range(ATTEMPTS):
        done = await store.use(alone)
        if done is not None:
            return done
    return None
