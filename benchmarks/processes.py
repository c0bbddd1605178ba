"""Processes that a bench starts and ends. The standard library alone, for every arm's environment."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def sigterm_afterwards() -> Iterator[None]:
    """Holds SIGTERM back until the end: whoever starts a process inside has it by then, and can end it."""
    held: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if held:
            signal.raise_signal(signal.SIGTERM)
