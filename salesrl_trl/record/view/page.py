"""The viewer's page: one HTML file with its scripts and style inside, for the server and for a file that stands alone.

Owns its Content-Security-Policy, and which completions a page without a server has. The sources in `assets` are plain
ES modules, put one after the other: there is no build step. `assets/vendor/preact.mjs` is Preact 11.2.0 (npm, MIT).
"""

import base64
import hashlib
import itertools
import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from salesrl_trl.errors import ConfigError
from salesrl_trl.record.view import queries
from salesrl_trl.record.view.record_index import SQL, Index
from salesrl_trl.record.view.wording import render

ASSETS = Path(__file__).parent / "assets"
PREACT = "vendor/preact.mjs"
SCRIPTS = ("words.js", "local.js", "core.js", "parts.js", "chart.js", "overview.js", "list.js", "completion.js",
           "diff.js", "runs.js", "report.js", "app.js")  # fmt: skip
"""Each imports from those before it alone."""
MOST = 200  # completions of a page that stands alone, unless another number is wanted: a file of up to 10 MB
MOST_STEPS = 60  # whose histograms such a page has, the last ones
LEADING = ("disagreement", "advantage", "slowest")
MODES = ("train", "eval")
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=\w)", re.MULTILINE)
_VENDOR_EXPORT = re.compile(r"export\{([^}]*)\};\s*(//# sourceMappingURL=\S*\s*)?$")


class Page(NamedTuple):
    """A page, and its Content-Security-Policy: this script, this style, requests to the own server or none."""

    html: str
    policy: str


def page(data: queries.Answer | None = None) -> Page:
    """The page. Without `data` it asks its server; with it, it stands alone."""
    script, style = _script(), (ASSETS / "style.css").read_text("utf-8")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        f"connect-src {'none' if data else 'self'!r}; base-uri 'none'; form-action 'none'"
    )
    # No text of the data can end its element: JSON has no `<` outside of its strings.
    text = "" if data is None else json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    html = render("viewer.html", policy=policy, style=style, script=script, data=text)
    return Page(html, policy.replace("'none'; script", "'none'; frame-ancestors 'none'; script", 1))


@cache
def _script() -> str:
    """All modules as one script. Names of the package's own are unique over its modules."""
    vendor = (ASSETS / PREACT).read_text("utf-8")
    exports = _VENDOR_EXPORT.search(vendor)
    assert exports is not None, "Preact's file is not the one that is released"
    names = ", ".join(f"{name}: {own}" for own, name in re.findall(r"([\w$]+) as ([\w$]+)", exports[1]))
    preact = f"const {{ h, render, Fragment }} = (() => {{ {vendor[: exports.start()]} return {{ {names} }}; }})();\n"
    own = (_EXPORT.sub("", _IMPORT.sub("", (ASSETS / name).read_text("utf-8"))) for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{preact}{"".join(own)}}})();\n'


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def data_alone(index: Index, most: int = MOST) -> queries.Answer:
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
            for (step,) in index.db.execute(SQL["last_steps"], (int(run), mode, MOST_STEPS))
        },
        "report": {run: _report(index, run) for run in runs},
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


def _report(index: Index, run: str) -> queries.Answer:
    try:
        return queries.report(index, {"run": run})
    except ConfigError as error:
        return {"sections": {}, "error": str(error)}


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
