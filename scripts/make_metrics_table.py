"""Make the table of metrics in docs/ARCHITECTURE.md from `salesrl_trl/figures.toml`.

    python scripts/make_metrics_table.py

tests/unit/scripts/test_metrics_table.py holds the table and the list `FIGURES` in step.
"""

from pathlib import Path

from salesrl_trl.names import FIGURES

PAGE = Path(__file__).resolve().parents[1] / "docs/ARCHITECTURE.md"
HEAD = "| name | meaning |\n|---|---|\n"


def table() -> str:
    """A row for each figure."""
    rows = (f"| `{figure.tag}` | {figure.meaning} |\n" for figure in FIGURES)
    return HEAD + "".join(rows).replace("{", "<").replace("}", ">")


def page(text: str) -> str:
    """The page with the table as it should be."""
    before, after = text.split(HEAD)
    _, blank, rest = after.partition("\n\n")
    return f"{before}{table()[:-1]}{blank}{rest}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
