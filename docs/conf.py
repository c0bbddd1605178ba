"""The documentation site: `scripts/site.sh` builds it with Sphinx. Pages are Markdown, read by MyST."""

import configparser
import re
from pathlib import Path

from docutils import nodes
from sphinx.domains import ObjType
from sphinx.domains.std import StandardDomain
from sphinx.util.docutils import SphinxRole

from scripts import make_reference

ROOT = Path(__file__).resolve().parents[1]
METADATA = configparser.RawConfigParser()
METADATA.read(ROOT / "setup.cfg", encoding="utf-8")

project = author = "salesrl_trl"
version = release = re.search(r'__version__ = "(.+)"', (ROOT / "salesrl_trl/__init__.py").read_text("utf-8"))[1]  # type: ignore[index]
extensions = ["myst_parser", "sphinx_copybutton", "sphinxcontrib.mermaid"]
html_theme = "furo"
html_title = f"{project} {version}"
html_static_path = html_css_files = ["site.css"]
html_search_scorer = str(ROOT / "docs/scorer.js")
html_show_copyright = html_show_sphinx = html_copy_source = False
exclude_patterns = ["conf.py"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
suppress_warnings = ["myst.header", "misc.highlighting_failure"]
copybutton_exclude = ".linenos, .gp"

LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(#[^)]*)?\)")
BRACES = str.maketrans("<>", "{}")  # Sphinx escapes angle brackets twice
PAGES = ROOT / "docs"
REPOSITORY = METADATA["metadata"].get("url", "").rstrip("/")


def _point_into_the_repository(app: object, name: str, source: list[str]) -> None:
    """Links to files outside docs/ lead to the repository, or show the file's name while setup.cfg has no address."""

    def replaced(found: re.Match[str]) -> str:
        _, text, path, anchor = found.groups(default="")
        file = (PAGES / name).parent.joinpath(path).resolve()  # `name`: of the page, such as `how-to/llm-judge`
        if not file.exists() or not file.is_relative_to(ROOT) or file.is_relative_to(PAGES):
            return found[0]  # another page, a picture of docs/, or a link that the build names as broken
        path = file.relative_to(ROOT).as_posix()
        named = text if text == f"`{path}`" else f"{text} (`{path}`)"
        return f"[{text}]({REPOSITORY}/blob/main/{path}{anchor})" if REPOSITORY else named

    source[0] = LINK.sub(replaced, source[0])


class _Entry(SphinxRole):
    """`{setting}`, `{metric}`, `{preset}`: an object of the search, and the anchor that its hit leads to."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        anchor = re.sub(r"\W+", "-", re.sub("[<>]", "", self.text))
        self.env.domains.standard_domain.note_object(self.name, self.text.translate(BRACES), anchor)
        return [nodes.literal(self.rawtext, self.text, ids=[anchor])], []


def _keep_flags_whole(app: object, tree: nodes.document, name: str) -> None:
    """Marks code in a text whose words fit on a phone's line, for site.css."""
    for literal in tree.findall(nodes.literal):
        if max(map(len, literal.astext().split()), default=0) <= 40:
            literal["classes"].append("whole")


def _name_the_language(app: object, name: str, template: str, context: dict[str, object], tree: object) -> None:
    """Browsers choose Chinese glyphs by `<html lang>`."""
    if name.startswith("zh/"):
        context["language"] = "zh-CN"


def _write_generated_pages(app: object) -> None:
    make_reference.main(PAGES / "reference")


def setup(app: object) -> None:
    """Called by Sphinx."""
    for kind in ("setting", "metric", "preset"):
        StandardDomain.object_types[kind] = ObjType(kind)
        app.add_role(kind, _Entry())  # type: ignore[attr-defined]
    app.connect("builder-inited", _write_generated_pages)  # type: ignore[attr-defined]
    app.connect("doctree-resolved", _keep_flags_whole)  # type: ignore[attr-defined]
    app.connect("html-page-context", _name_the_language)  # type: ignore[attr-defined]
    app.connect("source-read", _point_into_the_repository)  # type: ignore[attr-defined]
