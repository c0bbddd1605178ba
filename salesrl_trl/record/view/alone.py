"""What a page without a server knows: the answers to all its questions, and a sample of the completions."""

import itertools

from salesrl_trl.record.view import queries
from salesrl_trl.record.view.record_index import SQL, Index

MAX_STEPS = 60  # whose histograms such a page has, the last ones
LEADING = ("disagreement", "advantage", "slowest")
MODES = ("train", "eval")


def data_alone(index: Index, most: int) -> queries.Answer:
    """Answers to all questions of a page without a server: all figures, and at most so many completions."""
    with index.lock:
        items = _sample(index, most)
        state = queries.state(index)
    runs = [str(run) for run in range(len(index.runs))]
    sides = [*itertools.product(runs, MODES)]
    return {
        "state": {**state, "sample": len(items), "total": sum(run["many"] for run in state["runs"])},
        "items": items,
        "completions": {item["id"]: queries.completion(index, item["id"]) for item in items},
        "overview": {f"{run}/{mode}": queries.overview(index, {"run": run, "mode": mode}) for run, mode in sides},
        "histogram": {
            f"{run}/{mode}/{step}": queries.histogram(index, {"run": run, "mode": mode, "step": str(step)})
            for run, mode in sides
            for (step,) in index.db.execute(SQL["last_steps"], (int(run), mode, MAX_STEPS))
        },
        "report": {run: queries.report(index, {"run": run}) for run in runs},
        "row": {row: queries.row_over_time(index, {"row": row}) for row in {item["row"] for item in items}},
        "compare": {
            f"{left}/{right}/{mode}/{order}": queries.comparison(
                index, {"one": left, "other": right, "mode": mode, "order": order}
            )
            for left, right in itertools.permutations(runs, 2)
            for mode in MODES
            for order in queries.CHANGES
        },
    }


def _sample(index: Index, most: int) -> list[queries.Answer]:
    """The completions that lead the three lists of most interest, then some spread evenly over the rest."""
    chosen: dict[str, queries.Answer] = {}
    for order in LEADING:
        leading = queries.listing(index, {"order": order})["items"][: most // 6]
        chosen |= {item["id"]: item for item in leading}
    total = index.db.execute("SELECT count(*) FROM completions").fetchone()[0]
    every = max(-(-total // max(most - len(chosen), 1)), 1)
    rows = index.db.execute(SQL["spread"], (every,)).fetchall()
    for item in queries.items(index, rows):
        if len(chosen) < most:
            chosen.setdefault(item["id"], item)
    return sorted(chosen.values(), key=lambda item: (-item["step"], item["id"]))
