"""One completion's whole way, from the file that has it.

Owns what is read anew for each question: texts, verdicts, calls. Nothing of it is kept.
"""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from salesrl_trl.view.index import Index, Source, messages, reading, unpacked

EXCERPT = 200
"""Characters of a text in a list."""
MOST_CHARS = 40_000
"""Most of one text of a call. The rest is counted."""
Place = tuple[int, int, int]
"""Run, rank and id in the file."""
_OF_A_GROUP = ("outcome", "reason", "reward", "advantage")
_JSON = ("action", "parts", "functions", "seconds")


def place_of(name: str) -> Place:
    """Of an id on the page. Raises `KeyError` where it is none."""
    parts = name.split("-")
    if len(parts) != 3 or not all(part.isdecimal() and len(part) < 16 for part in parts):
        raise KeyError(name)
    run, rank, number = map(int, parts)
    return run, rank, number


def excerpts(index: Index, places: Iterable[Place], chars: int = EXCERPT) -> dict[Place, str]:
    """The beginnings of texts. Empty where a file was written anew meanwhile."""
    files: dict[tuple[int, int], list[int]] = defaultdict(list)
    found = dict.fromkeys(places, "")
    for run, rank, number in found:
        files[run, rank].append(number)
    for (run, rank), numbers in files.items():
        with reading(index.source(run, rank).path) as file:
            for number in numbers:
                row = file.execute(
                    "SELECT substr(text, 1, ?) FROM completions WHERE id = ?", (chars, number)
                ).fetchone()
                if row is not None:
                    found[run, rank, number] = row[0]
    return found


def prompt_of(index: Index, row: sqlite3.Row) -> list[dict[str, str]]:
    """The messages of a completion of the index. Empty where its file was written anew meanwhile."""
    with reading(index.source(row["run"], row["rank"]).path) as file:
        found = file.execute("SELECT prompt FROM completions WHERE id = ?", (row["id"],)).fetchone()
        return messages(_text(file, found["prompt"]) or '""') if found else []


def completion(index: Index, name: str) -> dict[str, Any]:
    """Everything about one completion.

    Args:
        index (`Index`):
            The runs.
        name (`str`):
            Its id on the page.

    Returns:
        `dict[str, Any]`: columns of the table by their names, texts in place of their numbers, and `messages`,
        `verdicts`, `calls`, `group`, `disagreement`.

    Raises:
        KeyError: there is no such completion.
    """
    run, rank, number = place_of(name)
    source = index.source(run, rank)
    with reading(source.path) as file:
        row = file.execute("SELECT * FROM completions WHERE id = ?", (number,)).fetchone()
        if row is None:
            raise KeyError(name)
        found = {key: row[key] for key in row.keys() if key not in ("digest", "prompt")}  # noqa: SIM118
        for key in _JSON:
            found[key] = None if found[key] is None else _value(found[key])
        for key in ("answer", "reference"):
            found[key] = _answer(file, row[key])
        found["messages"] = messages(_text(file, row["prompt"]) or '""')
        found["verdicts"] = [dict(each) for each in file.execute(
            "SELECT rubric, candidate, reference, reason, provider FROM verdicts WHERE completion = ?", (number,)
        )]  # fmt: skip
        found["calls"] = [_call(file, each) for each in file.execute(
            "SELECT * FROM calls WHERE completion = ? ORDER BY time, id", (number,)
        )]  # fmt: skip
    return {**found, "id": name, "run": run, "rank": rank, "group": _group(index, source, row)}


def _text(file: sqlite3.Connection, number: int | None) -> str | None:
    if number is None:
        return None
    row = file.execute("SELECT body FROM texts WHERE id = ?", (number,)).fetchone()
    return None if row is None else unpacked(row["body"])


def _value(text: str) -> Any:
    """A JSON value. What JSON has no number for, such as NaN, is a text: a browser reads no answer with it."""
    return json.loads(text, parse_constant=str)


def _answer(file: sqlite3.Connection, number: int | None) -> Any:
    text = _text(file, number)
    return None if text is None else _value(text)


def _call(file: sqlite3.Connection, row: sqlite3.Row) -> dict[str, Any]:
    kept = {key: row[key] for key in ("service", "path", "time", "seconds", "failure")}
    return {
        **kept,
        "request": _shortened(_text(file, row["request"])),
        "answer": _shortened(_text(file, row["answer"])),
    }


def _shortened(text: str | None) -> str | None:
    if text is None or len(text) <= MOST_CHARS:
        return text
    return f"{text[:MOST_CHARS]}\n… {len(text) - MOST_CHARS:,} more characters"


def _group(index: Index, source: Source, row: sqlite3.Row) -> list[dict[str, Any]]:
    """The completions of the same prompt in the same batch, of all ranks, with their texts."""
    with index.lock:
        rows: Sequence[sqlite3.Row] = index.db.execute(
            "SELECT * FROM completions WHERE row = ? AND step = ? AND run = ? AND mode = ? AND batch = ? "
            "AND prompt_group = ? ORDER BY rank, place, id",
            (row["row"], row["step"], source.run, row["mode"], row["batch"], row["prompt_group"]),
        ).fetchall()
    texts = excerpts(index, [(each["run"], each["rank"], each["id"]) for each in rows], chars=600)
    return [
        {"id": "-".join(map(str, place)), "text": text, **{key: each[key] for key in _OF_A_GROUP}}
        for each, (place, text) in zip(rows, texts.items(), strict=True)
    ]  # fmt: skip
