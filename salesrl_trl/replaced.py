"""One attribute of somebody else's object, replaced for a while.

Owns the one function that this package changes TRL, vLLM and transformers with. Standard library only.
"""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """While active, `owner` has this value under that name."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
