"""Log lines: the format of this package's lines, and a filter for lines of other packages.

Owns the one phrase of TRL that must not be logged. Standard library only.
"""

import logging

LINE_FORMAT = "%(asctime)s %(message)s"
TIME_FORMAT = "%H:%M:%S"
QUIET = {"httpx": logging.WARNING, "httpx2": logging.WARNING, "openai": logging.WARNING, "stamina": logging.ERROR}
"""Loggers of clients of services, and the least level that is shown of them. They log each request at INFO. stamina
warns of each retry, of which `reward.service.transport` has its own line."""


def show_lines() -> None:
    """Show this package's lines on stderr, unless the program has set up logging itself."""
    package = logging.getLogger("salesrl_trl")
    if package.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(LINE_FORMAT, TIME_FORMAT))
    package.addHandler(handler)
    package.setLevel(logging.INFO)


def quiet_clients() -> None:
    """Hide the lines that clients of services log for each request. A logger with a level of its own keeps it."""
    for name, level in QUIET.items():
        if logging.getLogger(name).level == logging.NOTSET:
            logging.getLogger(name).setLevel(level)


class LeaveOut(logging.Filter):
    """Drops every record that contains a phrase."""

    def __init__(self, phrase: str) -> None:
        super().__init__()
        self._phrase = phrase

    def filter(self, record: logging.LogRecord) -> bool:
        return self._phrase not in record.getMessage()


# TRL warns of a row that could not be scored, with its prompt and completion: customers' text.
_UNSCORABLE_ROW = LeaveOut("All reward functions returned None")


def hide_unscorable_rows() -> None:
    logging.getLogger("trl.trainer.grpo_trainer").addFilter(_UNSCORABLE_ROW)  # a logger takes the same filter once
