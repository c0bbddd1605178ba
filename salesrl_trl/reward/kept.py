"""Whether reference answers that an earlier run kept still hold: the knowledge behind them may have changed since.

Owns the comparison of some of them with fresh ones, what is forgotten after a difference, and what is said of either.
"""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime

from salesrl_trl.errors import ServiceError
from salesrl_trl.reward.cache import AnswerStore
from salesrl_trl.reward.rag import answer_from_json
from salesrl_trl.types import Answer, SalesRow

SAMPLES = 8
"""Kept answers that are asked for again: one changed document shows only in the rows that are about it."""
ATTEMPTS = 20
"""At a file that another process writes to, each of `cache.LOCK_TIMEOUT_S`."""


async def check_kept(
    references: AnswerStore,
    answers: AnswerStore,
    rows: Mapping[str, SalesRow],
    ask: Callable[[SalesRow], Awaitable[Answer]],
) -> tuple[str, bool] | None:
    """Compare what is kept with what the service says today; forget it where they differ.

    Args:
        references (`AnswerStore`):
            32B answers, of all runs.
        answers (`AnswerStore`):
            8B answers and verdicts, of this run. They are forgotten with the references.
        rows (`Mapping[str, SalesRow]`):
            The run's rows by the keys of their references.
        ask (`Callable[[SalesRow], Awaitable[Answer]]`):
            Asks for a reference. Raises `ServiceError`.

    Returns:
        `tuple[str, bool]`, *optional*: what there is to say, and whether it is a warning; `None` where nothing is
        kept.
    """
    known = await references.use(lambda file: [key for key in rows if _has(file, key)])
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
    forgotten = await _forget(references, known) and await _forget(answers, None)
    done = "are forgotten and asked for anew" if forgotten else "could NOT be forgotten: stop, and delete the file"
    return (
        f"the knowledge behind the 32B endpoint has changed: {changed} of {len(compared)} references differ from "
        f"those in {place}. Its answers to this run's rows ({share}), and what this run's folder holds of an earlier "
        f"start, {done}",
        True,
    )


def _has(file: sqlite3.Connection, key: str) -> bool:
    return file.execute("SELECT 1 FROM answers WHERE key = ?", (key,)).fetchone() is not None


async def _pair(
    references: AnswerStore, key: str, row: SalesRow, ask: Callable[[SalesRow], Awaitable[Answer]]
) -> tuple[Answer, Answer] | None:
    """The kept answer and a fresh one; `None` where one of them can't be had."""
    try:
        return answer_from_json(await references.get(key)), await ask(row)
    except (ServiceError, ValueError, TypeError, KeyError):
        return None


def _differ(kept: Answer, fresh: Answer) -> bool:
    """By passages, of which there are some: an endpoint that samples words its answers anew each time."""
    return {(each.id, each.text) for each in kept.passages} != {(each.id, each.text) for each in fresh.passages}


async def _forget(store: AnswerStore, keys: list[str] | None) -> bool:
    """Whether these, or all, are gone from the file."""

    def delete(file: sqlite3.Connection) -> bool:
        if keys is None:
            file.execute("DELETE FROM answers")
        else:
            file.executemany("DELETE FROM answers WHERE key = ?", [(key,) for key in keys])
        return True

    if store.path is None:
        return True
    for _ in range(ATTEMPTS):
        if await store.use(delete):
            return True
    return False
