"""One completion's whole way, from the file that has it.

Owns what the viewer reads anew for each question: texts, verdicts, calls. Nothing of it is kept. Called by `queries`
and by the viewer.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from typing import Any

from salesrl_trl.recording.reader import open_record, text_of, values_of
from salesrl_trl.view.record_index import Index, messages

EXCERPT = 200
"""Characters of a text in a list."""
GROUP_EXCERPT = 600
"""Characters of a text in the list of a group."""
MOST_CHARS = 40_000
"""Most of one text of a call. The rest is counted."""
Place = tuple[int, int, int]
"""Run, rank and id in the file."""


def place_of(name: str) -> Place:
    """Of an id on the page. Raises `KeyError` where it is none."""
    parts = name.split("-")
    if len(parts) != 3 or not all(part.isdecimal() and len(part) < 16 for part in parts):
        raise KeyError(name)
    run, rank, number = map(int, parts)
    return run, rank, number


def excerpts(index: Index, places: Iterable[Place], chars: int = EXCERPT) -> dict[Place, str]:
    """The beginnings of texts. Empty where a file was written anew meanwhile."""
    by_file: dict[tuple[int, int], list[int]] = defaultdict(list)
    texts = dict.fromkeys(places, "")
    for run, rank, number in texts:
        by_file[run, rank].append(number)
    for (run, rank), numbers in by_file.items():
        with closing(open_record(index.source(run, rank).path)) as file:
            marks = ", ".join("?" * len(numbers))
            query = f"SELECT id, substr(text, 1, ?) FROM completions WHERE id IN ({marks})"
            texts |= {(run, rank, number): text for number, text in file.execute(query, (chars, *numbers))}
    return texts


def completion(index: Index, name: str) -> dict[str, Any]:
    """Everything about one completion, by its id on the page: the columns of its table with texts in place of their
    numbers, and `messages`, `verdicts`, `calls`, `group`. Raises `KeyError` where there is none."""
    run, rank, number = place_of(name)
    with closing(open_record(index.source(run, rank).path)) as file:
        row = file.execute("SELECT * FROM completions WHERE id = ?", (number,)).fetchone()
        if row is None:
            raise KeyError(name)
        values = values_of(file, row, str)  # a browser reads no JSON with NaN as a number
        calls = file.execute("SELECT * FROM calls WHERE completion = ? ORDER BY time, id", (number,))
        values["calls"] = [_call(file, call) for call in calls]
    prompt = values.pop("prompt")
    del values["digest"]
    return {
        **values,
        "verdicts": [{"rubric": rubric, **asdict(judged)} for rubric, judged in values["verdicts"].items()],
        "messages": messages("" if prompt is None else prompt),
        "id": name,
        "run": run,
        "rank": rank,
        "group": _group(index, run, row),
    }


def prompt_of(index: Index, row: sqlite3.Row) -> list[dict[str, str]]:
    """The messages of a completion of the index. Empty where its file was written anew meanwhile."""
    try:
        return list(completion(index, f"{row['run']}-{row['rank']}-{row['id']}")["messages"])
    except KeyError:
        return []


def _call(file: sqlite3.Connection, row: sqlite3.Row) -> dict[str, Any]:
    values = {name: row[name] for name in ("service", "path", "time", "seconds", "failure")}
    for name in ("request", "answer"):
        text = None if row[name] is None else text_of(file, row[name])
        if text is not None and len(text) > MOST_CHARS:
            text = f"{text[:MOST_CHARS]}\n… {len(text) - MOST_CHARS:,} more characters"
        values[name] = text
    return values


def _group(index: Index, run: int, row: sqlite3.Row) -> list[dict[str, Any]]:
    """The completions of the same prompt in the same batch, of all ranks, with their texts."""
    with index.lock:
        rows = index.db.execute(
            "SELECT * FROM completions WHERE row = ? AND step = ? AND run = ? AND mode = ? AND batch = ? "
            "AND prompt_group = ? ORDER BY rank, place, id",
            (row["row"], row["step"], run, row["mode"], row["batch"], row["prompt_group"]),
        ).fetchall()
    places = [(other["run"], other["rank"], other["id"]) for other in rows]
    texts = excerpts(index, places, GROUP_EXCERPT)
    return [
        {"id": "-".join(map(str, place)), "text": texts[place],
         **{name: other[name] for name in ("outcome", "reason", "reward", "advantage")}}
        for place, other in zip(places, rows, strict=True)
    ]  # fmt: skip
