"""Texts that can be encoded: without half a surrogate pair, which JSON (`"\\ud83d"`) and Python's strings may hold.

Owns what takes the place of such a half, and its count in the log. Standard library only. It is called where texts of
others enter: bodies of services, files of rows, and what functions and tools return.
"""

import logging
import re
from collections import Counter
from collections.abc import Mapping
from typing import TypeVar, cast

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
    """The value itself, or a copy in which U+FFFD stands for each half of a surrogate pair. The log counts the values
    that had one by `source`, such as `"a reply of judge"`."""
    if is_unicode(value):
        return value
    _replaced[source] += 1
    if re.fullmatch("10*", str(_replaced[source])):
        logger.warning(
            f"[Text] {source} contains half a surrogate pair, which can't be encoded. It is replaced by U+FFFD "
            f"({_replaced[source]} so far; logged again at ten times as many)"
        )
    return cast(T, _mended(value))


def _mended(value: object) -> object:
    if isinstance(value, str):  # two halves that stand together become one character
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, Mapping):
        return {_mended(key): _mended(part) for key, part in value.items()}
    parts = [_mended(part) for part in value] if isinstance(value, list | tuple) else value
    return tuple(parts) if isinstance(value, tuple) and isinstance(parts, list) else parts
