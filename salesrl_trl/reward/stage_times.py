"""Per-completion bookkeeping: stage timings, and errors in reward code."""

import asyncio
import logging
import sysconfig
import time
import traceback
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TypeVar

from salesrl_trl.names import Stage
from salesrl_trl.telemetry.completion_record import CompletionRecord
from salesrl_trl.timing import Span
from salesrl_trl.types import Outcome, Reward, missing

T = TypeVar("T")

logger = logging.getLogger(__name__)


class StageTimes:
    """Times the stages of one completion. `track` is its row in the trace."""

    def __init__(self, track: str) -> None:
        self.seconds: dict[str, float] = {}
        self.spans: list[Span] = []
        self.track = track
        self.completion_record: CompletionRecord | None = None
        self.elsewhere: Sequence[str] = ()  # stages running in another process
        self._open: list[str] = []

    @property
    def own_record(self) -> CompletionRecord:
        """The completion's record, created on first access."""
        self.completion_record = self.completion_record or CompletionRecord()
        return self.completion_record

    @property
    def under_way(self) -> list[str]:
        """The running stages. From any thread."""
        return [*self._open, *self.elsewhere]

    async def timed(self, call: Awaitable[T], stage: str) -> T:
        """Await `call` as a stage."""
        failed, started = True, time.perf_counter()
        self._open.append(stage)
        try:
            result = await call
            failed = False
            return result
        finally:
            self._open.remove(stage)
            self.record(stage, started, failed)

    def record(self, stage: str, started: float, failed: bool = False) -> None:
        """Record a stage that began at `started` and ends now."""
        track = f"{self.track} reference" if stage == Stage.RAG_32B else self.track
        span = Span(name=stage, started=started, ended=time.perf_counter(), track=track, failed=failed)
        self.adopt([span])

    def adopt(self, spans: Sequence[Span], record: CompletionRecord | None = None) -> None:
        """Add finished stages, possibly from another process, with its record."""
        if record is not None:
            self.own_record.add(record)
        self.spans.extend(spans)
        self.seconds.update({span.name: span.seconds for span in spans})


def place_of(error: BaseException) -> str:
    """Where an error was raised, as `/path/rewards.py:31`: the innermost frame outside libraries, if any."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    foreign = [place for place in places if not place[0].startswith(_LIBRARIES) and "-packages" not in place[0]]
    return "{}:{}".format(*(foreign or places)[-1]) if places else "an unknown place"


_LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]), "<frozen")


class FaultLog:
    """Logs each error in reward code once, by location and without its message, which may quote a customer."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def conclude(self, scoring: "asyncio.Task[Reward]") -> Reward:
        """The reward of a finished `score` task, whether it returned, raised or was cancelled."""
        if scoring.cancelled():
            return missing(Outcome.INFRA, "cancelled")
        error = scoring.exception()
        if error is None:
            return scoring.result()
        self.log("the reward", error)
        return missing(Outcome.INFRA, f"raised_{type(error).__name__}")

    def log(self, what: str, error: BaseException) -> None:
        name, place = type(error).__name__, place_of(error)
        self.log_once(f"{what} raised {name} at {place}; affected completions stay unscored")

    def log_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            logger.error(line)
