"""Make docs/COMING_FROM.md from `salesrl_trl/launch/coming_from.yaml`.

    python scripts/make_coming_from.py

tests/unit/scripts/test_coming_from.py holds both in step.
"""

from pathlib import Path

from salesrl_trl.launch.coming_from import Name, names

PAGE = Path(__file__).resolve().parents[1] / "docs/COMING_FROM.md"
BEGIN, END = "<!-- made: {} -->\n", "<!-- end -->\n"


def table(system: str) -> str:
    """A row for each name of a system."""
    head = f"| {system} | here | |\n|---|---|---|\n"
    return head + "".join(_row(name, line) for name, line in names().items() if line.system == system)


def _row(name: str, line: Name) -> str:
    here = ", ".join(f"`{setting}`" for setting in (line.here or line.see).split(", ") if setting)
    values = [f"`{there}` is `{value}`" for there, value in (line.values or {}).items() if there != value]
    notes = [*values, line.note, f"where `{line.when}` is on" if line.when else ""]
    return f"| `{name}` | {here or 'not here'} | {'; '.join(filter(None, notes))} |\n"


def page(text: str) -> str:
    """The page with its tables as they should be."""
    for system in ("verl", "upper case"):
        begin = BEGIN.format(system)
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{table(system)}{END}{rest.partition(END)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
