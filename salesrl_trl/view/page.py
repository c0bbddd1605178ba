"""The page: one HTML file with its scripts and style inside, for the server and for a file that stands alone.

Owns how modules become one script, and what the page may do (its Content-Security-Policy). The sources in `assets` are
plain ES modules, put one after the other here: there is no build step. `assets/vendor/preact.mjs` is Preact 11.2.0 as
released on npm, MIT, 12 kB.
"""

import base64
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
PREACT = "vendor/preact.mjs"
SCRIPTS = ("words.js", "core.js", "local.js", "parts.js", "chart.js", "overview.js", "list.js", "completion.js",
           "runs.js", "app.js")  # fmt: skip
"""Each imports from those before it alone."""
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=\w)", re.MULTILINE)
_VENDOR_EXPORT = re.compile(r"export\{([^}]*)\};\s*(//# sourceMappingURL=\S*\s*)?$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A page and what its browser may do."""

    html: str
    policy: str
    """Content-Security-Policy: this script, this style, requests to the own server or none."""


def page(data: object = None) -> Page:
    """The page.

    Args:
        data (JSON, *optional*):
            What a page that stands alone shows. Without it the page asks its server.

    Returns:
        `Page`
    """
    script, style = _script(), (ASSETS / "style.css").read_text("utf-8")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        f"connect-src {'none' if data else 'self'!r}; base-uri 'none'; form-action 'none'"
    )
    # No text of the data can end its element: JSON has no `<` outside of its strings.
    given = "" if data is None else json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    return Page(
        html='<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>salesrl</title>\n'
        f'<link rel="icon" href="data:,">\n<style>{style}</style>\n</head>\n<body>\n<div id="app"></div>\n'
        f'<script type="application/json" id="data">{given}</script>\n<script>{script}</script>\n</body>\n</html>\n',
        policy=policy.replace("'none'; script", "'none'; frame-ancestors 'none'; script", 1),
    )


@cache
def _script() -> str:
    """All modules as one script. Names of the package's own are unique over its modules."""
    vendor, found = (ASSETS / PREACT).read_text("utf-8"), None
    found = _VENDOR_EXPORT.search(vendor)
    assert found is not None, "Preact's file is not the one that is released"
    given = ", ".join(f"{name}: {own}" for own, name in re.findall(r"([\w$]+) as ([\w$]+)", found[1]))
    preact = f"const {{ h, render, Fragment }} = (() => {{ {vendor[: found.start()]} return {{ {given} }}; }})();\n"
    own = (_EXPORT.sub("", _IMPORT.sub("", (ASSETS / name).read_text("utf-8"))) for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{preact}{"".join(own)}}})();\n'


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
