"""One deadline for everything that is done on behalf of a reward phase.

Owns the moment and how it travels: in a context variable, which every task started inside takes along. Does not cancel
anything: whoever waits asks how long it may.
"""

import contextlib
import math
import time
from collections.abc import Iterator
from contextvars import ContextVar

_END: ContextVar[float] = ContextVar("salesrl_trl_deadline", default=math.inf)


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Everything inside is to be over in `seconds`. An outer deadline that ends earlier stays in force."""
    token = _END.set(min(_END.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _END.reset(token)


def remaining_s() -> float:
    """Seconds left, never below 0; infinite where nobody set a deadline."""
    return max(_END.get() - time.monotonic(), 0.0)
