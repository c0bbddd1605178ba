"""Logging: this package's line format, hidden lines of other libraries, and errors of trackers, files and the hub that
must not end a run. Standard library only."""

import contextlib
import functools
import logging
import os
from collections.abc import Iterator

logger = logging.getLogger(__name__)

LINE_FORMAT = "%(asctime)s %(message)s"
TIME_FORMAT = "%H:%M:%S"
QUIET = {"httpx": logging.WARNING, "httpx2": logging.WARNING, "openai": logging.WARNING}
"""HTTP client loggers and their minimum level. They log each request at INFO."""


def show_lines() -> None:
    """Show this package's log lines on stderr, unless the program has configured logging."""
    package = logging.getLogger("salesrl_trl")
    if package.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(LINE_FORMAT, TIME_FORMAT))
    package.addHandler(handler)
    package.setLevel(logging.INFO)


class _Lacks(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return self.name not in record.getMessage()


_HIDDEN = {  # by logger: records containing this phrase
    # TRL's warning about an unscored row quotes its prompt and completion: customers' text
    "trl.trainer.grpo_trainer": _Lacks("All reward functions returned None"),
    # on every weight push on a CPU, for modules with buffers only; the worker itself reports weights it lacks
    "vllm.model_executor.model_loader.reload.layerwise": _Lacks(": Failed to load weights"),
    # a branch without rows in a step lacks a mean, so TensorBoard skips the point
    "transformers.integrations.integration_utils": _Lacks('Trainer is attempting to log a value of "None"'),
}


def _without_rank(record: logging.LogRecord) -> bool:
    """Remove the rank prefix of accelerate's loggers in single-process runs."""
    if isinstance(record.msg, str) and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        record.msg = record.msg.removeprefix("[RANK 0] ")
    return True


def hide_lines() -> None:
    """Hide per-request lines of HTTP clients, unless the program has set their loggers' level, the records in
    `_HIDDEN`, and the rank prefix in single-process runs."""
    for name, level in QUIET.items():
        if logging.getLogger(name).level == logging.NOTSET:
            logging.getLogger(name).setLevel(level)
    for name, hidden in _HIDDEN.items():
        logging.getLogger(name).addFilter(hidden)  # adding it again has no effect
    for name in [*logging.root.manager.loggerDict]:
        if name.startswith(("salesrl_trl.", "trl.")):
            logging.getLogger(name).addFilter(_without_rank)


@contextlib.contextmanager
def spared(what: str, errors: type[Exception] = Exception) -> Iterator[None]:
    """An error inside the block ends only the block, not the run, and is logged once. `what`: the target of metrics or
    tables, such as `"TensorBoard"`."""
    try:
        yield
    except errors as error:
        tell(what, error)


def tell(what: str, error: Exception) -> None:
    """Log, once, that `what` lacks entries."""
    reason = f": {os.strerror(error.errno)}" if isinstance(error, OSError) and error.errno else ""  # without addresses
    warn_once(f"{what} can't be written ({type(error).__name__}{reason}): it lacks entries. Training continues")


warn_once = functools.cache(logger.warning)
