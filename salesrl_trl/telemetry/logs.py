"""Log lines: the format of this package's lines, and a filter for lines of other packages.

Owns the one phrase of TRL that must not be logged. Standard library only.
"""

import logging

LINE_FORMAT = "%(asctime)s %(message)s"
TIME_FORMAT = "%H:%M:%S"


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


# TRL warns of a row that could not be scored, with its prompt and completion: customers' text.
_UNSCORABLE_ROW = LeaveOut("All reward functions returned None")


def hide_unscorable_rows() -> None:
    logging.getLogger("trl.trainer.grpo_trainer").addFilter(_UNSCORABLE_ROW)  # a logger takes the same filter once
