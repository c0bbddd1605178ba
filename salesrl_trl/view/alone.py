"""What a page without a server shows: all figures, and a sample of the completions.

Owns which completions are chosen: those that lead the three lists of most interest, then some spread evenly over
the rest. The page says how many were left out.
"""

from salesrl_trl.view import queries
from salesrl_trl.view.detail import completion
from salesrl_trl.view.index import Index

MOST = 200
"""Completions, unless another number is wanted: a file of up to 10 MB."""
LEADING = ("disagreement", "advantage", "slowest")
MODES = ("train", "eval")


def data(index: Index, most: int = MOST) -> queries.Answer:
    """The page's data.

    Args:
        index (`Index`):
            The runs, read to their ends.
        most (`int`):
            Completions at most.

    Returns:
        `Answer`: JSON of the answers that a server would give, by question.
    """
    with index.lock:
        chosen = _chosen(index, most)
        state = queries.state(index)
    runs = range(len(index.runs))
    pairs = [(one, other) for one in runs for other in runs if one != other]
    rows = {item["row"] for item in chosen}
    return {
        "state": {**state, "sample": len(chosen), "total": sum(run["many"] for run in state["runs"])},
        "items": chosen,
        "completions": {item["id"]: completion(index, item["id"]) for item in chosen},
        "overview": {
            f"{run}/{mode}": queries.overview(index, {"run": str(run), "mode": mode}) for run in runs for mode in MODES
        },
        "row": {row: queries.row_over_time(index, {"row": row}) for row in rows},
        "compare": {
            f"{one}/{other}/{mode}/{order}": queries.comparison(
                index, {"one": str(one), "other": str(other), "mode": mode, "order": order}
            )
            for one, other in pairs
            for mode in MODES
            for order in queries.CHANGES
        },
    }


def _chosen(index: Index, most: int) -> list[queries.Answer]:
    found: dict[str, queries.Answer] = {}
    for order in LEADING:
        for item in queries.listing(index, {"order": order})["items"][: most // 6]:
            found[item["id"]] = item
    room = most - len(found)
    total = index.db.execute("SELECT count(*) FROM completions").fetchone()[0]
    every = max(-(-total // max(room, 1)), 1)
    rows = index.db.execute(
        "SELECT * FROM (SELECT *, row_number() OVER (ORDER BY run, step, n) AS at FROM completions) WHERE at % ? = 0",
        (every,),
    ).fetchall()
    for item in queries.items(index, rows):
        if len(found) < most:
            found.setdefault(item["id"], item)
    return sorted(found.values(), key=lambda item: (-item["step"], item["id"]))
