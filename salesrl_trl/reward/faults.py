"""What becomes of an error in a reward's code: the completion is missing, the place is logged once, the run goes on.

Owns the rule and the lines. Batches (`batch`), the child process (`worker`) and `functions` follow it.
"""

import asyncio
import logging

from salesrl_trl.reward.scoring import missing
from salesrl_trl.types import Outcome, Reward

logger = logging.getLogger(__name__)

_TIED = (
    "SQLite objects created in a thread", "signal only works in main thread", "'_thread._local' object has no",
    "a different event loop", "a different loop", "no current event loop", "no running event loop",
)  # fmt: skip
"""In messages of errors about an object that belongs to one thread, or to one event loop."""
_OF_ONE_THREAD = (
    ". It runs in another thread than the main one, and uses what belongs to one thread or event loop: make that "
    "where it is used (docs/REWARDS.md, 'Threads')"
)


class FaultLog:
    """Logs each fault in code once, by its place and without its message, which may hold a customer's text."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def conclude(self, scoring: "asyncio.Task[Reward]") -> Reward:
        """The reward of a `score` that returned, raised or was cancelled."""
        if scoring.cancelled():
            return missing(Outcome.INFRA, "cancelled", {})
        error = scoring.exception()
        if error is None:
            return scoring.result()
        self.log("the reward", error)
        return missing(Outcome.INFRA, f"raised_{type(error).__name__}", {})

    def log(self, what: str, error: BaseException) -> None:
        """Log an error in a reward's code, once for each place."""
        name, trace = type(error).__name__, error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "an unknown place"
        hint = _OF_ONE_THREAD if any(phrase in str(error) for phrase in _TIED) else ""
        self.log_once(f"{what} raised {name} at {place}; completions it happens to are missing{hint}")

    def log_once(self, line: str) -> None:
        """Log an error, the first time that it comes."""
        if line not in self._logged:
            self._logged.add(line)
            logger.error(line)
