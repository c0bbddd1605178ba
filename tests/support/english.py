"""Counts habits of translated English in the project's prose, for this checkout or another.

    python tests/support/english.py
    python tests/support/english.py --root PATH --list takes
    python tests/support/english.py --under salesrl_trl/launch

Prose is README, the pages under docs/ and recipes/, and the docstrings, comments and strings of three words or more in
the package, the scripts and the examples. Fenced code, inline code and links' targets do not count.
"""

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md", "recipes/**/*.md", "docs/**/*.md")
OTHER_TEXTS = ("salesrl_trl/**/*.toml", "salesrl_trl/**/*.yaml")
PROGRAMS = ("salesrl_trl/**/*.py", "scripts/*", "examples/**/*.py")
LOG_OF_EXPERIMENTS = ("docs/experiments/", "docs/EXPERIMENTS.md")
"""A dated diary, in older checkouts below docs/."""
GENERATED = tuple(f"docs/{name}.md" for name in ("API", "TROUBLESHOOTING")) + tuple(
    f"docs/reference/{name}.md"
    for name in ("api", "troubleshooting", "settings", "recipes", "metrics", "command-line", "verl-names")
)
"""Pages made of the package's texts, which count there."""

HABITS = {
    "is no X, has no X": r"\b(?:is|are|was|were|has|have|had) no (?!longer\b|more\b|\w+er\b)\w",
    "fronted genitive": r"(?:^|[.:;] )Of (?:the|a|an|its|all|these|each|\d+)\b",
    "takes": r"\b(?:takes|took)\b(?! (?:place|effect|precedence|care|over|part|up|turns|\d|X|about|as long|longer"
    r"|several|seconds|minutes|hours|less|more|a (?:second|minute|while)|half|twice|too long|time))",
    "goes on": r"\b(?:goes|go|went|gone|going) on\b",
    "stands, comes, gives": r"\b(?:stands|stood|comes|came|gives|gave|brings|brought)\b(?! (?:for|back|up)\b)",
    "that is ...ed": r"\bthat (?:is|are|was|were) (?:\w+ed|made|given|taken|sent|read|written|left|asked|kept)\b",
    "says so": r"\b(?:says|say|said|tells|tell|told)\b",
    "what is ...ed": r"\b[Ww]hat (?:is|was|are|were) (?:\w+ed|made|given|taken|sent|read|written|left|kept)\b",
    "mend": r"\b[Mm]end(?:s|ed|ing)?\b",
    "missing (unscored)": r"\bmissing (?:completions?|rewards?|scores?)\b|\b(?:is|are|as|counts as) missing\b",
    "equal groups": r"\b[Ee]qual groups?\b|\bgroups? that (?:teach|teaches)\b",
    "left out": r"\bleft out\b|\bleaves? out\b|\bleaving out\b",
    "slots, calls at once": r"\bslots?\b|\bcalls at once\b",
    "last words": r"\blast words\b",
    "stand-in": r"\bstand-ins?\b",
    "packaged": r"\bpackaged\b",
    "meter": r"\b(?:the|a|its) meter\b",
    "figure (metric)": r"\bfigures?\b",
    "law (controller)": r"\blaws?\b",
    "taste (bias)": r"\btastes?\b",
    "card (GPU)": r"\b(?:a|the|one|each|own|this|second|two|per|\d+) cards?\b(?! of the (?:hub|model))",
    "passes": r"(?<!forward )(?<!backward )(?<!both )\b(?:the|own|its) passes\b|\bpasses of\b",
}


def prose_of_markdown(text: str) -> Iterator[str]:
    """Paragraphs, list items, headings and table rows, without code and links' targets."""
    text = re.sub(r"^( *)(```+|~~~+).*?^\1\2", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "X", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*#|]|\d+\.))", text):
        yield " ".join(block.split())


def prose_of_python(text: str) -> Iterator[str]:
    """Docstrings, comments and longer strings."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Constant(value=str() as found):
                yield from _sentences(found)
            case ast.JoinedStr(values=values):
                yield from _sentences("".join(v.value if isinstance(v, ast.Constant) else "X" for v in values))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


def prose_of_settings(text: str) -> Iterator[str]:
    """Values and comments of a TOML or YAML file: all of its words."""
    yield from prose_of_markdown(text)


def prose_of_shell(text: str) -> Iterator[str]:
    """Comments, and quoted words of three or more."""
    yield from prose_of_markdown(" ".join(re.findall(r"^\s*#(?!!)(.*)", text, re.MULTILINE)))
    for found in re.findall(r'"((?:[^"\\]|\\.)*)"|\'([^\']*)\'', re.sub(r"^\s*#.*", "", text, flags=re.MULTILINE)):
        yield from _sentences("".join(found))


def _sentences(found: str) -> Iterator[str]:
    if len(found.split()) >= 3:
        yield from prose_of_markdown(found)


def texts(root: Path, under: str = "") -> Iterator[tuple[str, str]]:
    """Each piece of prose with its file."""
    for pattern in PAGES:
        for path in sorted(root.glob(pattern)):
            name = str(path.relative_to(root))
            if name.startswith(under) and not name.startswith(LOG_OF_EXPERIMENTS) and name not in GENERATED:
                yield from ((name, piece) for piece in prose_of_markdown(path.read_text("utf-8")))
    for path in sorted(path for pattern in PROGRAMS for path in root.glob(pattern) if path.is_file()):
        if (name := str(path.relative_to(root))).startswith(under):
            prose = prose_of_python if path.suffix == ".py" else prose_of_shell
            yield from ((name, piece) for piece in dict.fromkeys(prose(path.read_text("utf-8"))))
    for pattern in OTHER_TEXTS:
        for path in sorted(root.glob(pattern)):
            if (name := str(path.relative_to(root))).startswith(under):
                yield from ((name, piece) for piece in prose_of_settings(path.read_text("utf-8")))


def counted(root: Path, under: str = "") -> dict[str, Counter[str]]:
    """For pages, the package's texts, and scripts with examples: how often each habit occurs."""
    counts = {kind: Counter(dict.fromkeys(HABITS, 0)) for kind in ("pages", "package", "scripts")}
    for name, piece in texts(root, under):
        is_program = name.startswith(("scripts/", "examples/")) and not name.endswith(".md")
        kind = "package" if name.startswith("salesrl_trl/") else "scripts" if is_program else "pages"
        counts[kind].update({habit: len(re.findall(pattern, piece)) for habit, pattern in HABITS.items()})
    return counts


def main() -> None:
    """Print the counts, or the places of one habit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--under", default="", help="only files whose path begins so")
    parser.add_argument("--list", metavar="WORDS", help="places of the habits whose name begins so ('' for all)")
    options = parser.parse_args()
    if options.list is not None:
        for name, piece in texts(options.root.resolve(), options.under):
            for habit, pattern in HABITS.items():
                for found in re.finditer(pattern, piece) if habit.startswith(options.list) else ():
                    print(f"{name}: [{habit}] ...{piece[max(0, found.start() - 60) : found.end() + 60]}...")
        return
    counts = counted(options.root.resolve(), options.under)
    for habit in HABITS:
        print(f"{habit:24}", *(f"{count[habit]:6} {kind}" for kind, count in counts.items()))
    print(f"{'together':24}", *(f"{count.total():6} {kind}" for kind, count in counts.items()))


if __name__ == "__main__":
    main()
