"""Texts that can be encoded, without half a surrogate pair, which JSON and Python's strings may hold; and tables for a
terminal. `encodable` is called where texts of others enter: from services, files, functions and tools."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

NOT_KNOWN = "n/a"
logger = logging.getLogger(__name__)
T = TypeVar("T")
_replaced = Counter[str]()  # values of this process with half a pair, by source


def is_unicode(value: object) -> bool:
    """Whether all texts in a value can be encoded, those in mappings, lists and tuples too. Raises `RecursionError`
    for a value that is nested too deep."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
    elif isinstance(value, Mapping):
        return all(is_unicode(key) and is_unicode(part) for key, part in value.items())
    return not isinstance(value, list | tuple) or all(map(is_unicode, value))


def encodable(value: T, source: str) -> T:
    """The value itself, or a copy in which U+FFFD stands for each half of a surrogate pair. The log counts the
    values that had one by `source`, such as `"a reply of judge"`."""
    if is_unicode(value):
        return value
    _replaced[source] += 1
    if (count := _replaced[source]) in (1, 10, 100, 1_000, 10_000, 100_000):
        logger.warning(f"[Text] {source} contains half a surrogate pair, which U+FFFD replaces ({count} so far)")
    return cast(T, _mended(value))


def _mended(value: object) -> object:
    if isinstance(value, str):  # two halves that stand together become one character
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, Mapping):
        return {_mended(key): _mended(part) for key, part in value.items()}
    parts = [_mended(part) for part in value] if isinstance(value, list | tuple) else value
    return tuple(parts) if isinstance(value, tuple) and isinstance(parts, list) else parts


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
    import jinja2  # beyond the standard library, and for commands alone

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["aligned"] = aligned
    return environment.from_string(template.read_text("utf-8")).render(values).rstrip("\n")


def calls_and_usd(calls: float, usd: float) -> str:
    """`1,234 calls, 0.42 USD`; `1,234 calls` where they cost nothing."""
    return f"{calls:,.0f} calls" + (f", {usd:,.{2 if usd >= 0.1 else 4}f} USD" if usd else "")
