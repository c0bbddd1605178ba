"""What loggers say: third parties' less what is not to be said, this package's where nobody has set logging up.

Owns the filter and the format of a line; who uses the filter names the phrase. Standard library only.
"""

import logging

LINE_FORMAT = "%(asctime)s %(message)s"
TIME_FORMAT = "%H:%M:%S"


def show_lines() -> None:
    """Show this package's lines on stderr, unless the program has set up logging of its own."""
    package = logging.getLogger("salesrl_trl")
    if package.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(LINE_FORMAT, TIME_FORMAT))
    package.addHandler(handler)
    package.setLevel(logging.INFO)


class LeaveOut(logging.Filter):
    """Drops the records that hold a phrase."""

    def __init__(self, phrase: str) -> None:
        super().__init__()
        self._phrase = phrase

    def filter(self, record: logging.LogRecord) -> bool:
        return self._phrase not in record.getMessage()
