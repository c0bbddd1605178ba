"""What third parties' loggers are not to say.

Owns the filter; who uses it names the phrase. Standard library only.
"""

import logging


class LeaveOut(logging.Filter):
    """Drops the records that hold a phrase."""

    def __init__(self, phrase: str) -> None:
        super().__init__()
        self._phrase = phrase

    def filter(self, record: logging.LogRecord) -> bool:
        return self._phrase not in record.getMessage()
