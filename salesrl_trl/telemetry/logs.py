"""Log lines: the format of this package's lines, which lines of others are hidden, and errors of trackers, files and
the hub that end no run. Standard library only."""

import contextlib
import functools
import logging
import os
from collections.abc import Iterator

logger = logging.getLogger(__name__)

LINE_FORMAT = "%(asctime)s %(message)s"
TIME_FORMAT = "%H:%M:%S"
QUIET = {"httpx": logging.WARNING, "httpx2": logging.WARNING, "openai": logging.WARNING}
"""Loggers of clients of services, and the least level that is shown of them. They log each request at INFO."""


def show_lines() -> None:
    """Show this package's lines on stderr, unless the program has set up logging itself."""
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


_LEFT_OUT = {  # by logger, records with a phrase
    # TRL warns of a row that could not be scored, with its prompt and completion: customers' text
    "trl.trainer.grpo_trainer": _Lacks("All reward functions returned None"),
    # at every weight push on a CPU, about modules with buffers and no weights; missing weights the worker names itself
    "vllm.model_executor.model_loader.reload.layerwise": _Lacks(": Failed to load weights"),
    # a branch without rows in a step has no mean, and TensorBoard draws no point for it
    "transformers.integrations.integration_utils": _Lacks('Trainer is attempting to log a value of "None"'),
}


def _without_rank(record: logging.LogRecord) -> bool:
    """Take off the rank that accelerate's loggers begin a line with, where there is one rank."""
    if isinstance(record.msg, str) and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        record.msg = record.msg.removeprefix("[RANK 0] ")
    return True


def hide_lines() -> None:
    """Hide the lines that clients of services log for each request, unless the program has set the level of their
    loggers, what `_LEFT_OUT` has, and the rank of the only process."""
    for name, level in QUIET.items():
        if logging.getLogger(name).level == logging.NOTSET:
            logging.getLogger(name).setLevel(level)
    for name, left_out in _LEFT_OUT.items():
        logging.getLogger(name).addFilter(left_out)  # a logger takes the same filter once
    for name in [*logging.root.manager.loggerDict]:
        if name.startswith(("salesrl_trl.", "trl.")):
            logging.getLogger(name).addFilter(_without_rank)


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
