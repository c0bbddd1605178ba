"""Log lines: the format of this package's lines, and a filter for lines of other packages.

Owns which lines of others are hidden. Standard library only.
"""

import logging

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


class LeaveOut(logging.Filter):
    """Drops every record that contains a phrase."""

    def __init__(self, phrase: str) -> None:
        super().__init__()
        self._phrase = phrase

    def filter(self, record: logging.LogRecord) -> bool:
        return self._phrase not in record.getMessage()


_LEFT_OUT = {  # by logger, records with a phrase
    # TRL warns of a row that could not be scored, with its prompt and completion: customers' text
    "trl.trainer.grpo_trainer": LeaveOut("All reward functions returned None"),
    # at every weight push on a CPU, about the one module that has no weights
    "vllm.model_executor.model_loader.reload.layerwise": LeaveOut("RotaryEmbedding: Failed to load weights"),
    # a branch without rows in a step has no mean, and TensorBoard draws no point for it
    "transformers.integrations.integration_utils": LeaveOut('Trainer is attempting to log a value of "None"'),
}


def hide_lines() -> None:
    """Hide the lines that clients of services log for each request, unless the program has set the level of their
    loggers, and what `_LEFT_OUT` has."""
    for name, level in QUIET.items():
        if logging.getLogger(name).level == logging.NOTSET:
            logging.getLogger(name).setLevel(level)
    for name, left_out in _LEFT_OUT.items():
        logging.getLogger(name).addFilter(left_out)  # a logger takes the same filter once
