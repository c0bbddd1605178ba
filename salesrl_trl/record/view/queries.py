"""Answers the viewer's queries.

Query values are only passed as SQL parameters. A completion's details are always read from its file.
"""

import json
import math
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import asdict

from salesrl_trl.errors import ConfigError
from salesrl_trl.record.reader import open_record, text_of, values_of
from salesrl_trl.record.report import figures_of, read_run
from salesrl_trl.record.view.record_index import SQL, Index, messages

Params = Mapping[str, str]
Answer = dict[str, object]

EXCERPT, GROUP_EXCERPT = 200, 600  # characters of a text in lists, and in a group's list; `viewer.sql` keeps 600
PAGE = 50
EQUAL = ("branch", "outcome", "reason", "provider", "mode", "row")
BETWEEN = ("reward", "advantage", "step")
SHOWN = ("run", "step", "mode", "row", "branch", "outcome", "reason", "provider", "reward", "reference_reward",
         "advantage", "judge_s", "tokens")  # fmt: skip
MEASURED = ("reference_reward", "advantage", "judge_s", "tokens")
"""Optional numbers: the page shows those present in the record."""
ORDERS = {
    f"{name}_{end}": (f"ifnull({name}, {last})", direction)
    for name in ("step", "reward", *MEASURED)
    for end, last, direction in (("high", "-1e308", "DESC"), ("low", "1e308", "ASC"))
}
"""Key and direction. Completions without the number are last."""


def number(params: Params, name: str) -> float | None:
    """A finite number from a query; `None` if absent. Raises `ValueError` for other texts."""
    text = params.get(name, "").strip()
    value = float(text) if text else None
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{name} is not a number")
    return value


def whole(params: Params, name: str, default: int = 0) -> int:
    value = number(params, name)
    return default if value is None else int(value)


def _condition(params: Params) -> tuple[str, list[object]]:
    terms, values = ["1"], list[object]()
    if params.get("run"):
        terms.append("run = ?")
        values.append(whole(params, "run"))
    for name in EQUAL:
        if params.get(name):
            terms.append(f"{name} = ?")
            values.append(params[name])
    for name in BETWEEN:
        for end, sign in (("min", ">="), ("max", "<=")):
            if (value := number(params, f"{name}_{end}")) is not None:
                terms.append(f"{name} {sign} ?")
                values.append(value)
    if word := params.get("text", "").strip():
        terms.append(SQL["find"])
        values += [word.lower()] * 2
    return " AND ".join(terms), values


def state(index: Index, _: Params) -> Answer:
    """Refresh the index and return the runs and filter options."""
    index.refresh(longest_s=0.5)
    with index.lock:
        runs = []
        for at, path in enumerate(index.runs):
            row = index.db.execute(SQL["run"], (at,)).fetchone()
            runs.append({"name": path.resolve().name, "path": str(path), **dict(row)})
        if index.facets[0] != index.version and not index.reading:  # counts by column and value
            counts = "SELECT {0}, count(*) FROM completions WHERE {0} != '' GROUP BY 1 ORDER BY 2 DESC"
            columns = ("branch", "outcome", "reason", "provider", "mode")
            facets = {name: dict(index.db.execute(counts.format(name)).fetchall()) for name in columns}
            numbers = ", ".join(f"count({name}) AS {name}" for name in MEASURED)
            facets["has"] = dict(index.db.execute(f"SELECT {numbers} FROM completions").fetchone())
            index.facets = (index.version, facets)
        progress = {"version": index.version, "reading": index.reading}
        return {**progress, "runs": runs, "facets": index.facets[1]}


def listing(index: Index, params: Params) -> Answer:
    """A page of the list: `total`, `items`, and `next`, the `after` of the next query or `None`. `params` may contain
    `run`, names of `EQUAL`, `NAME_min` and `NAME_max` for those of `BETWEEN`, `text`, and an `order` of `ORDERS`."""
    order = params.get("order") or "step_high"
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r}")
    key, direction = ORDERS[order]
    with index.lock:
        sql, values = _condition(params)
        total = index.db.execute(f"SELECT count(*) FROM completions WHERE {sql}", values).fetchone()[0]
        if params.get("after"):
            at, _, n = params["after"].partition("~")
            after = {"at": at, "n": n}
            sql = f"{sql} AND ({key}, n) {'<' if direction == 'DESC' else '>'} (?, ?)"
            values = [*values, number(after, "at"), whole(after, "n")]
        rows = index.db.execute(
            # sort keys only, which costs a fifth of sorting whole rows
            f"SELECT * FROM (SELECT n, {key} AS key FROM completions WHERE {sql} "
            f"ORDER BY key {direction}, n {direction} LIMIT ?) JOIN completions USING (n) "
            f"ORDER BY key {direction}, n {direction}",
            [*values, PAGE + 1],
        ).fetchall()
    shown = rows[:PAGE]
    last = f"{shown[-1]['key']!r}~{shown[-1]['n']}" if len(rows) > PAGE else None
    return {"total": total, "items": items(index, shown), "next": last}


def items(index: Index, rows: list[sqlite3.Row], shown: Iterable[str] = SHOWN, chars: int = EXCERPT) -> list[Answer]:
    """Completions for lists, with the first characters of their texts, at most 600."""
    query = f"SELECT n, substr(excerpt, 1, ?) FROM texts WHERE n IN ({', '.join('?' * len(rows))})"
    with index.lock:
        texts = dict(index.db.execute(query, (chars, *(row["n"] for row in rows))).fetchall())
    return [
        {
            "id": f"{row['run']}-{row['rank']}-{row['id']}",
            "text": texts.get(row["n"], ""),  # its file may have been rewritten
            **{name: row[name] for name in shown},
        }
        for row in rows
    ]


def overview(index: Index, params: Params) -> Answer:
    """Statistics by step and branch of one run: completions, scored ones, mean rewards, outcomes."""
    with index.lock:
        asked = {"run": whole(params, "run"), "mode": params.get("mode") or "train"}
        rows = index.db.execute(SQL["overview"], asked).fetchall()
    return {"steps": [{**dict(row), "outcomes": json.loads(row["outcomes"])} for row in rows]}


def comparison(index: Index, params: Params) -> Answer:
    """Compare two runs on their shared rows, by each row's mean reward when last trained on or evaluated. `params`
    contains the run numbers `one` and `other`, and `mode`. The answer contains the `total` of shared rows, their mean
    `change`, the numbers of `better` and `worse` ones, and `rows` with the largest changes."""
    runs = {"one": whole(params, "one"), "other": whole(params, "other", 1), "mode": params.get("mode") or "train"}
    with index.lock:
        index.db.execute("DROP TABLE IF EXISTS compared")
        index.db.execute(SQL["compared"], runs)
        sums = index.db.execute(SQL["changes"]).fetchone()
        rows = index.db.execute("SELECT * FROM compared ORDER BY abs(change) DESC, row LIMIT 200").fetchall()
    return {**dict(sums), "rows": [dict(row) for row in rows]}


def completion(index: Index, params: Params) -> Answer:
    """All data of one completion, by its `id` on the page: its columns with texts resolved, and `messages`, `turns`,
    `verdicts`, `calls` and `group`. Raises `KeyError` if it does not exist."""
    name = params["id"]
    parts = name.split("-")
    if len(parts) != 3 or not all(part.isdecimal() and len(part) < 16 for part in parts):
        raise KeyError(name)
    run, rank, number = map(int, parts)
    with closing(open_record(index.path(run, rank))) as file:
        row = file.execute("SELECT * FROM completions WHERE id = ?", (number,)).fetchone()
        if row is None:
            raise KeyError(name)
        values = values_of(file, row, str)  # browsers can't parse NaN in JSON
        weights = file.execute("SELECT value FROM meta WHERE name = 'weights'").fetchone()
        asked = file.execute("SELECT * FROM calls WHERE completion = ? ORDER BY time, id", (number,))
        calls = [
            dict(call) | {name: call[name] and text_of(file, call[name]) for name in ("request", "answer")}
            for call in asked.fetchall()
        ]
    with index.lock:
        group = index.db.execute(SQL["group"], {**dict(row), "run": run}).fetchall()
    prompt, turns = values.pop("prompt"), values["turns"]
    del values["digest"]
    return {
        **values,
        "turns": messages(turns) if turns else [],
        "calls": calls,
        "weights": {} if weights is None else json.loads(weights[0]),
        "verdicts": [{"rubric": rubric, **asdict(judged)} for rubric, judged in values["verdicts"].items()],
        "messages": messages("" if prompt is None else prompt),
        "id": name,
        "run": run,
        "rank": rank,
        "group": items(index, group, ("outcome", "reason", "reward", "advantage"), GROUP_EXCERPT),
    }


def report(index: Index, params: Params) -> Answer:
    """The `figures` of a run's report, or an `error`."""
    run = whole(params, "run")
    if not 0 <= run < len(index.runs):
        raise KeyError(run)
    try:
        return {"figures": figures_of(read_run(index.runs[run]))}
    except ConfigError as error:
        return {"error": str(error)}
