"""Tables and texts for a terminal.

Owns the words for a number, the padding of columns, and how a template becomes a text. Commands call it.
"""

from collections.abc import Sequence
from pathlib import Path

import jinja2

NOT_KNOWN = "n/a"


def number(value: float | None, form: str = ".3f") -> str:
    """`0.412`; `n/a` for `None`."""
    return NOT_KNOWN if value is None else format(value, form)


def aligned(rows: Sequence[Sequence[object]], left: int = 1) -> list[str]:
    """Lines with columns of equal width. The first `left` columns begin at the same place, the others end there."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in texts
    ]


def filled(template: Path, **values: object) -> str:
    """The text of a Jinja template. Its filter `aligned` makes a table of rows."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["aligned"] = lambda rows, left=1: "\n".join(aligned(rows, left))
    return environment.from_string(template.read_text("utf-8")).render(values).rstrip("\n")


def calls_and_usd(calls: float, usd: float) -> str:
    """`1,234 calls, 0.42 USD`; `1,234 calls` where they cost nothing."""
    return f"{calls:,.0f} calls" + (f", {usd:,.{2 if usd >= 0.1 else 4}f} USD" if usd else "")
