"""Strings without lone surrogates, which JSON and Python strings may contain but UTF-8 can't encode; and terminal
tables. `encodable` is called wherever external text enters: from services, files, functions and tools."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

NOT_KNOWN = "n/a"
logger = logging.getLogger(__name__)
T = TypeVar("T")
_replaced = Counter[str]()  # values with lone surrogates in this process, by source


def is_unicode(value: object) -> bool:
    """Whether all strings in a value can be encoded, including those in mappings, lists and tuples. Raises
    `RecursionError` for values nested too deeply."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
    elif isinstance(value, Mapping):
        return all(is_unicode(key) and is_unicode(part) for key, part in value.items())
    return not isinstance(value, list | tuple) or all(map(is_unicode, value))


def encodable(value: T, source: str) -> T:
    """The value itself, or a copy with U+FFFD for each lone surrogate. Logs the number of such values by `source`,
    e.g. `"a reply of judge"`."""
    if is_unicode(value):
        return value
    _replaced[source] += 1
    if (count := _replaced[source]) in (1, 10, 100, 1_000, 10_000, 100_000):
        logger.warning(f"[Text] {source} contains a lone surrogate, replaced by U+FFFD ({count} so far)")
    # adjacent halves become one character
    return cast(T, mapped(value, lambda raw: raw.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")))


def mapped(value: object, change: Callable[[str], str]) -> object:
    """The value with its strings changed, including those in mappings, lists and tuples."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {mapped(key, change): mapped(part, change) for key, part in value.items()}
    parts = [mapped(part, change) for part in value] if isinstance(value, list | tuple) else value
    return tuple(parts) if isinstance(value, tuple) and isinstance(parts, list) else parts


def number(value: float | None, form: str = ".3f") -> str:
    """`0.412`; `n/a` for `None`."""
    return NOT_KNOWN if value is None else format(value, form)


def aligned(rows: Sequence[Sequence[object]], left: int = 1) -> list[str]:
    """Table lines with aligned columns: the first `left` ones left-aligned, the others right-aligned."""
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
    """Render a Jinja template. The filter `aligned` turns rows into table lines."""
    import jinja2  # not in the standard library; only commands need it

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["aligned"] = aligned
    return environment.from_string(template.read_text("utf-8")).render(values).rstrip("\n")


def calls_and_usd(calls: float, usd: float) -> str:
    """`1,234 calls, 0.42 USD`; `1,234 calls` if they are free."""
    return f"{calls:,.0f} calls" + (f", {usd:,.{2 if usd >= 0.1 else 4}f} USD" if usd else "")
