"""Answers to the viewer's questions, for the viewer and for a `page` that stands alone.

Values of a question only ever stand in parameters of SQL. A completion's whole way is read anew from its file.
"""

import itertools
import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from typing import Any

from salesrl_trl.errors import ConfigError
from salesrl_trl.record.reader import open_record, text_of, values_of
from salesrl_trl.record.view.record_index import SQL, Index, messages
from salesrl_trl.record.view.report_page import sections
from salesrl_trl.record.view.run_folder import read_run

Params = Mapping[str, str]
Answer = dict[str, Any]

EXCERPT, GROUP_EXCERPT = 200, 600  # characters of a text in a list, and in the list of a group; `viewer.sql` keeps 600
MOST_CHARS = 40_000  # most of one text of a call. The rest is counted.
PAGE = 50
MOST_OF_A_ROW = 800
MOST_WHOLE = 2**53
EQUAL = ("branch", "outcome", "reason", "provider", "mode", "row", "recovered")
BETWEEN = ("reward", "advantage", "step")
SHOWN = ("run", "step", "mode", "row", "branch", "outcome", "reason", "provider", "reward", "reference_reward",
         "advantage", "judge_s", "call_s", "recovered", "disagreement", "tokens")  # fmt: skip
MEASURED = ("reference_reward", "advantage", "call_s", "recovered", "disagreement", "tokens")
"""Numbers that a task may have or not: the page shows those that the record has."""
BINS = 20
EXPORTED = ("row", "branch", "step", "mode", "outcome", "reason", "reward", "advantage", "flag", "note")
_LOW, _HIGH = "-1e308", "1e308"
ORDERS = {
    "newest": ("step", "DESC"),
    "oldest": ("step", "ASC"),
    "disagreement": (f"ifnull(disagreement, {_LOW})", "DESC"),
    "advantage": (f"ifnull(abs(advantage), {_LOW})", "DESC"),
    "slowest": (f"ifnull(call_s, {_LOW})", "DESC"),
    **{
        f"{name}_{end}": (f"ifnull({name}, {last})", direction)
        for name in ("step", "reward", "reference_reward", "advantage", "disagreement", "call_s", "tokens")
        for end, last, direction in (("high", _LOW, "DESC"), ("low", _HIGH, "ASC"))
    },
}
"""Key and direction. What has no such number comes last."""


class BadQuestionError(ValueError):
    """A question that the page does not ask."""


def number(params: Params, name: str) -> float | None:
    """A finite number of a question. `None` where none is given."""
    text = params.get(name, "").strip()
    try:
        value = float(text) if text else None
    except ValueError:
        value = math.nan
    if value is not None and not math.isfinite(value):
        raise BadQuestionError(f"{name} is no number")
    return value


def whole(params: Params, name: str, default: int = 0) -> int:
    value = number(params, name)
    if value is not None and abs(value) > MOST_WHOLE:
        raise BadQuestionError(f"{name} is too large")
    return default if value is None else int(value)


def _mode(params: Params) -> str:
    return params.get("mode") or "train"


def _condition(index: Index, params: Params) -> tuple[str, list[Any]]:
    terms, values = ["1"], list[Any]()
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
    if flag := params.get("flag"):
        terms.append("(flag != '' OR note != '')" if flag == "any" else "flag = ?")
        values += [] if flag == "any" else [flag]
    if word := params.get("text", "").strip():
        index.find(word)
        terms.append("n IN (SELECT n FROM matches)")
    return " AND ".join(terms), values


def state(index: Index) -> Answer:
    """Runs, and what there is to choose from."""
    with index.lock:
        runs = []
        for at, path in enumerate(index.runs):
            row = index.db.execute(SQL["run"], (at,)).fetchone()
            runs.append({"name": path.resolve().name, "path": str(path), **dict(row)})
        counted, total = sum(index.facets[1].get("mode", {}).values()), sum(run["many"] for run in runs)
        is_due = not index.reading or total >= 2 * counted  # a count at each state would slow the reading down
        if index.facets[0] != index.version and is_due:  # the codes of each column, and how many completions have them
            counts = "SELECT {0}, count(*) FROM completions WHERE {0} != '' GROUP BY 1 ORDER BY 2 DESC"
            columns = ("branch", "outcome", "reason", "provider", "mode")
            facets = {name: dict(index.db.execute(counts.format(name)).fetchall()) for name in columns}
            numbers = ", ".join(f"count({name}) AS {name}" for name in MEASURED)
            facets["has"] = dict(index.db.execute(f"SELECT {numbers} FROM completions").fetchone())
            noted = "SELECT flag, count(*) FROM notes o JOIN completions c USING (run, rank, id, time) GROUP BY 1"
            facets["flag"] = dict(index.db.execute(noted).fetchall())
            index.facets = (index.version, facets)
        progress = {"version": index.version, "reading": index.reading, "trouble": index.trouble}
        return {**progress, "runs": runs, "facets": index.facets[1]}


def listing(index: Index, params: Params) -> Answer:
    """A page of the list: `total`, `items`, and `next`, which the next question has as `after`, or `None`. `params`
    may have `run`, the names of `EQUAL`, `NAME_min` and `NAME_max` for those of `BETWEEN`, `text`, an `order` of
    `ORDERS`."""
    order = params.get("order") or "newest"
    if order not in ORDERS:
        raise BadQuestionError(f"there is no order {order!r}")
    key, direction = ORDERS[order]
    table = "noted" if params.get("flag") else "completions"  # which has an index that covers the count
    with index.lock:
        sql, values = _condition(index, params)
        total = index.db.execute(f"SELECT count(*) FROM {table} WHERE {sql}", values).fetchone()[0]
        if params.get("after"):
            at, _, n = params["after"].partition("~")
            after = {"at": at, "n": n}
            sql = f"{sql} AND ({key}, n) {'<' if direction == 'DESC' else '>'} (?, ?)"
            values = [*values, number(after, "at"), whole(after, "n")]
        rows = index.db.execute(
            # Only what orders them goes through the sorting: a fifth of the time of whole rows.
            f"SELECT * FROM (SELECT n, {key} AS key FROM {table} WHERE {sql} "
            f"ORDER BY key {direction}, n {direction} LIMIT ?) JOIN noted USING (n) "
            f"ORDER BY key {direction}, n {direction}",
            [*values, PAGE + 1],
        ).fetchall()
    shown = rows[:PAGE]
    last = f"{shown[-1]['key']!r}~{shown[-1]['n']}" if len(rows) > PAGE else None
    return {"total": total, "items": items(index, shown), "next": last}


def items(index: Index, rows: list[sqlite3.Row], shown: Iterable[str] = SHOWN, chars: int = EXCERPT) -> list[Answer]:
    """Completions as lists show them, with the beginning of their texts, at most 600 characters."""
    query = f"SELECT n, substr(excerpt, 1, ?) FROM texts WHERE n IN ({', '.join('?' * len(rows))})"
    with index.lock:
        texts = dict(index.db.execute(query, (chars, *(row["n"] for row in rows))).fetchall())
    return [
        {
            "id": f"{row['run']}-{row['rank']}-{row['id']}",
            "text": texts.get(row["n"], ""),  # its file may have been written anew
            **{name: row[name] for name in (*shown, "flag", "note")},
        }
        for row in rows
    ]


def overview(index: Index, params: Params) -> Answer:
    """Figures of every step and branch of one run: completions, those with a reward, mean rewards, outcomes."""
    with index.lock:
        rows = index.db.execute(SQL["overview"], {"run": whole(params, "run"), "mode": _mode(params)}).fetchall()
    return {"steps": [{**dict(row), "outcomes": json.loads(row["outcomes"])} for row in rows]}


def histogram(index: Index, params: Params) -> Answer:
    """How often each reward was given at a `step`, the last one without it: `edges` of the bins, and `counts` of each
    branch. Empty where nothing was scored."""
    run, mode = whole(params, "run"), _mode(params)
    with index.lock:
        last_of = "SELECT max(step) FROM completions WHERE run = ? AND mode = ?"
        (last,) = index.db.execute(last_of, (run, mode)).fetchone()
        step = whole(params, "step", last or 0)
        rewards = index.db.execute(SQL["rewards"], (run, mode, step)).fetchall()
    if not rewards:
        return {"step": step, "edges": [], "counts": {}}
    low, high = min(row["reward"] for row in rewards), max(row["reward"] for row in rewards)
    if low >= 0 and high <= 1:  # the range that most rewards have: steps can be compared
        low, high = 0.0, 1.0
    width = (high - low) / BINS or 1.0
    counts: dict[str, list[int]] = {branch: [0] * BINS for branch in sorted({row["branch"] for row in rewards})}
    for branch, reward in rewards:
        counts[branch][min(int((reward - low) / width), BINS - 1)] += 1
    return {"step": step, "edges": [low + width * at for at in range(BINS + 1)], "counts": counts}


def row_over_time(index: Index, params: Params) -> Answer:
    """All completions of one row of the dataset, in all runs, by step. Of very many, the latest."""
    with index.lock:
        name = params.get("row", "")
        total = index.db.execute("SELECT count(*) FROM completions WHERE row = ?", (name,)).fetchone()[0]
        rows = index.db.execute(SQL["row"], {"row": name, "most": MOST_OF_A_ROW}).fetchall()
    prompt: list[Any] = []
    if rows:
        with suppress(KeyError):  # its file was written anew meanwhile
            prompt = completion(index, "-".join(str(rows[-1][part]) for part in ("run", "rank", "id")))["messages"]
    return {"row": name, "total": total, "items": items(index, rows), "messages": prompt}


CHANGES = {"largest": "abs(change) DESC", "worse": "change ASC", "better": "change DESC"}


def comparison(index: Index, params: Params) -> Answer:
    """Rows that two runs share: the mean reward of each where it was last trained on, or evaluated. `params` has `one`
    and `other`, numbers of runs, `mode`, an `order` of `CHANGES`, and `offset`. The answer has the `total` of rows in
    both, their mean `change`, how many got `better` and `worse`, `rows`, and `next`, an offset or `None`."""
    order = params.get("order") or "largest"
    if order not in CHANGES:
        raise BadQuestionError(f"there is no order {order!r}")
    offset = max(whole(params, "offset"), 0)
    runs = {"one": whole(params, "one"), "other": whole(params, "other", 1), "mode": _mode(params)}
    with index.lock:
        index.db.execute("DROP TABLE IF EXISTS compared")
        index.db.execute(SQL["compared"], runs)
        sums = index.db.execute(SQL["changes"]).fetchone()
        rows = index.db.execute(
            f"SELECT * FROM compared ORDER BY {CHANGES[order]}, row LIMIT ? OFFSET ?", (PAGE + 1, offset)
        ).fetchall()
    more = len(rows) > PAGE
    return {**dict(sums), "rows": [dict(row) for row in rows[:PAGE]], "next": offset + PAGE if more else None}


def place_of(name: str) -> tuple[int, int, int]:
    """Run, rank and id in its file of a completion, by its id on the page. Raises `KeyError` for what is no id."""
    parts = name.split("-")
    if len(parts) != 3 or not all(part.isdecimal() and len(part) < 16 for part in parts):
        raise KeyError(name)
    run, rank, number = map(int, parts)
    return run, rank, number


def completion(index: Index, name: str) -> Answer:
    """Everything about one completion, by its id on the page: the columns of its table with texts in place of their
    numbers, and `messages`, `turns`, `verdicts`, `calls`, `group`. Raises `KeyError` where there is none."""
    run, rank, number = place_of(name)
    with closing(open_record(index.source(run, rank).path)) as file:
        row = file.execute("SELECT * FROM completions WHERE id = ?", (number,)).fetchone()
        if row is None:
            raise KeyError(name)
        values = values_of(file, row, str)  # a browser reads no JSON with NaN as a number
        weights = file.execute("SELECT value FROM meta WHERE name = 'weights'").fetchone()
        calls = []
        for call in file.execute("SELECT * FROM calls WHERE completion = ? ORDER BY time, id", (number,)):
            shown = {column: call[column] for column in ("service", "path", "time", "seconds", "failure")}
            for column in ("request", "answer"):
                text = None if call[column] is None else text_of(file, call[column])
                if text is not None and len(text) > MOST_CHARS:
                    text = f"{text[:MOST_CHARS]}\n… {len(text) - MOST_CHARS:,} more characters"
                shown[column] = text
            calls.append(shown)
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
        **_note_of(index, run, rank, number),
        "run": run,
        "rank": rank,
        "group": _group(index, run, row),
    }


def _group(index: Index, run: int, row: sqlite3.Row) -> list[Answer]:
    """The completions of the same prompt in the same batch, of all ranks, with their texts."""
    with index.lock:
        rows = index.db.execute(SQL["group"], {**dict(row), "run": run}).fetchall()
    return items(index, rows, ("outcome", "reason", "reward", "advantage"), GROUP_EXCERPT)


def keep_note(index: Index, asked: object) -> Answer:
    """Keep `flag` and `note` of the completion `id`. Returns them as they are kept."""
    if not isinstance(asked, dict):
        raise BadQuestionError("a note is a JSON object with id, flag and note")
    run, rank, number = place_of(str(asked.get("id", "")))
    with index.lock:
        row = index.db.execute(SQL["note_of"], (run, rank, number)).fetchone()
        if row is None:
            raise KeyError(number)
        index.notes.write(row, str(asked.get("flag") or ""), str(asked.get("note") or ""))
        index.version += 1
        return _note_of(index, run, rank, number)


def _note_of(index: Index, run: int, rank: int, number: int) -> Answer:
    with index.lock:
        row = index.db.execute(SQL["note_of"], (run, rank, number)).fetchone()
    return {name: "" if row is None else row[name] for name in ("flag", "note")}


def report(index: Index, params: Params) -> Answer:
    """The report of a run as its sections, or an `error` where it has no figures."""
    run = whole(params, "run")
    if not 0 <= run < len(index.runs):
        raise KeyError(run)
    try:
        return {"sections": sections(read_run(index.runs[run]))}
    except ConfigError as error:
        return {"sections": {}, "error": str(error)}


def export(index: Index, params: Params) -> Iterator[str]:
    """Lines of JSON for the completions that a list's `params` choose. `kind` is `dataset`, a line for each with its
    prompt, or `preference`: of each prompt the best and the worst completion by reward, if they differ. Completions
    without a reward are in no preference."""
    kind = params.get("kind") or "dataset"
    if kind not in ("dataset", "preference"):
        raise BadQuestionError(f"there is no export {kind!r}")
    with index.lock:
        sql, values = _condition(index, params)
        found = index.db.execute(f"SELECT * FROM noted WHERE {sql} ORDER BY run, rank, id", values).fetchall()
    return _preferences(_whole_of(index, found)) if kind == "preference" else map(_line, _whole_of(index, found))


def _whole_of(index: Index, rows: list[sqlite3.Row]) -> Iterator[Answer]:
    for (run, rank), group in itertools.groupby(rows, key=lambda row: (row["run"], row["rank"])):
        with closing(open_record(index.source(run, rank).path)) as file:
            for row in group:
                told = file.execute("SELECT * FROM completions WHERE id = ?", (row["id"],)).fetchone()
                prompt = told and text_of(file, told["prompt"])
                if not prompt:
                    continue  # its writer has just dropped it
                turns = text_of(file, told["turns"]) if told["turns"] else None
                yield {
                    "prompt": json.loads(prompt), "completion": json.loads(turns) if turns else told["text"],
                    "run": index.runs[run].resolve().name,
                    **{name: row[name] for name in EXPORTED},
                }  # fmt: skip


def _line(value: Answer) -> str:
    """A line of JSON. The completion of a conversation is a message too, as TRL's datasets have it."""
    if isinstance(value["prompt"], list):
        texts = {name: value[name] for name in ("completion", "chosen", "rejected") if name in value}
        texts = {name: text for name, text in texts.items() if isinstance(text, str)}
        value = {**value, **{name: [{"role": "assistant", "content": text}] for name, text in texts.items()}}
    return json.dumps(value, ensure_ascii=False) + "\n"


def _preferences(completions: Iterable[Answer]) -> Iterator[str]:
    ends: dict[tuple[str, str], tuple[Answer, Answer]] = {}
    for each in (each for each in completions if each["reward"] is not None):
        key = each["row"], json.dumps(each["prompt"], sort_keys=True)
        best, worst = ends.get(key, (each, each))  # of equal ones the first
        ends[key] = max(best, each, key=lambda one: one["reward"]), min(worst, each, key=lambda one: one["reward"])
    for best, worst in ends.values():
        if best["reward"] > worst["reward"]:
            yield _line({
                "prompt": best["prompt"], "chosen": best["completion"], "rejected": worst["completion"],
                "row": best["row"], "branch": best["branch"], "chosen_reward": best["reward"],
                "rejected_reward": worst["reward"],
            })  # fmt: skip
