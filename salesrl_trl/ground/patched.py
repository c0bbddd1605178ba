"""An attribute of another library's object, replaced for a while.

Owns the one function with which this package changes TRL, vLLM and transformers. Standard library only.
Called wherever another library is changed, for example by `generation.vllm` and `wiring.trl_access`.
"""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def patched(owner: object, name: str, value: object) -> Iterator[None]:
    """While active, `owner` has this value under that name."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
