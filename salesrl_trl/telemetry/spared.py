"""Errors of trackers, files and the hub that end no run: one line for each kind."""

import contextlib
import functools
import logging
import os
from collections.abc import Iterator

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def spared(what: str, errors: type[Exception] = Exception) -> Iterator[None]:
    """Inside the block an error ends the block alone, not the run. One line says so, the first time. `what`: what gets
    figures or tables here, such as `"TensorBoard"`."""
    try:
        yield
    except errors as error:
        tell(what, error)


def tell(what: str, error: Exception) -> None:
    """Log that entries of this are missing, the first time."""
    reason = f": {os.strerror(error.errno)}" if isinstance(error, OSError) and error.errno else ""  # without addresses
    warn_once(f"{what} can't be written ({type(error).__name__}{reason}): entries are missing there. Training goes on")


warn_once = functools.cache(logger.warning)
