"""`python -m salesrl_trl.record.view RUN [RUN ...] [--port PORT] [--html FILE [--most N]]`.

Serves a page on loopback until Ctrl-C, or writes one that stands alone: it has the answers to all its questions, and a
sample of the completions. Owns the command line. Exit code 2, with one message, for a folder without a record.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from salesrl_trl.ground.command_line import exit_code
from salesrl_trl.ground.process import make_private
from salesrl_trl.ground.shutdown import end_tidily
from salesrl_trl.record.reader import DAMAGED
from salesrl_trl.record.view import queries
from salesrl_trl.record.view.page import page
from salesrl_trl.record.view.record_index import SQL, Index
from salesrl_trl.record.view.viewer import Viewer

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


def main(argv: Sequence[str] | None = None) -> int:
    """Serve or write the page. Returns the exit code."""
    return exit_code("view", argv, _show, OverflowError, *DAMAGED)  # the first one: no such port


def _show(args: argparse.Namespace) -> None:
    with closing(Index(args.runs)) as index:
        if args.html:
            return _write(index, args.html, args.most)
        viewer = Viewer(index, args.port)
        try:
            print(viewer.url)
            print("This address is for you alone: the page shows what customers said. Ctrl-C ends.", flush=True)
            viewer.serve_forever()
        except KeyboardInterrupt:  # how it is meant to end
            print()
        finally:
            viewer.server_close()


def _write(index: Index, path: Path, most: int) -> None:
    index.refresh()
    data = data_alone(index, most)
    path.parent.mkdir(parents=True, exist_ok=True)
    make_private(path)  # as the record
    path.write_text(page(data).html, encoding="utf-8", errors="replace")
    print(f"Page: {path}\n{data['state']['sample']:,} of {data['state']['total']:,} completions are in it.")


if __name__ == "__main__":
    end_tidily()
    sys.exit(main())
