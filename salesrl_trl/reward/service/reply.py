"""The JSON of a service's reply, read strictly: what two readers could understand differently is no reply.

Pure: no network. What a reply has to hold is the business of its client.
"""

import json
from collections.abc import Sequence


def read_json(content: bytes) -> object:
    """The value of a body. Raises `ValueError` unless it is JSON in UTF-8, in which no object has a key twice."""
    try:
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("a body that is nested too deep") from None


def has_twice(pairs: Sequence[tuple[str, object]]) -> bool:
    """Whether a key comes twice among the pairs of an object."""
    return len(dict(pairs)) < len(pairs)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if has_twice(pairs):
        raise ValueError("an object with a key twice")
    return dict(pairs)
