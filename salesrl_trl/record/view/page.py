"""The viewer's page: one HTML file with inlined scripts and style, for the server and as a standalone file.

Owns its Content-Security-Policy. The sources in `assets` are plain ES modules, concatenated without a build step.
`assets/vendor/preact.mjs` is Preact 11.2.0 (npm, MIT).
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from salesrl_trl.ground.texts import filled

ASSETS = Path(__file__).parent / "assets"
PREACT = "vendor/preact.mjs"
SCRIPTS = ("words.js", "core.js", "parts.js", "chart.js", "overview.js", "list.js", "completion.js", "runs.js",
           "report.js", "app.js")  # fmt: skip
"""Each module imports only from earlier ones."""
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=\w)", re.MULTILINE)
_VENDOR_EXPORT = re.compile(r"export\{([^}]*)\};\s*(//# sourceMappingURL=\S*\s*)?$")


def page(data: Mapping[str, object] | None = None) -> str:
    """The page. Without `data` it queries its server; with it, it is a standalone report. Its policy permits only this
    script, this style, and requests to its own server, if any."""
    script, style = _script(), (ASSETS / "style.css").read_text("utf-8")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        f"connect-src {'none' if data else 'self'!r}; base-uri 'none'; form-action 'none'"
    )
    # escaping `<`, which JSON only uses in strings, keeps data from closing its element
    text = "" if data is None else json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    return filled(ASSETS / "page.html", policy=policy, style=style, script=script, data=text)


@cache
def _script() -> str:
    """All modules as one script. The package's own names are unique across modules."""
    vendor = (ASSETS / PREACT).read_text("utf-8")
    exports = _VENDOR_EXPORT.search(vendor)
    assert exports is not None, "Preact's file differs from the release"
    names = ", ".join(f"{name}: {own}" for own, name in re.findall(r"([\w$]+) as ([\w$]+)", exports[1]))
    preact = f"const {{ h, render, Fragment }} = (() => {{ {vendor[: exports.start()]} return {{ {names} }}; }})();\n"
    own = (_EXPORT.sub("", _IMPORT.sub("", (ASSETS / name).read_text("utf-8"))) for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{preact}{"".join(own)}}})();\n'


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
