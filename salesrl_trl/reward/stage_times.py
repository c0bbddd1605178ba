"""What is noted of single completions: times of stages, and errors in a reward's code."""

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
    """Times the stages of one completion. `track` is the line of the trace on which they are drawn."""

    def __init__(self, track: str) -> None:
        self.seconds: dict[str, float] = {}
        self.spans: list[Span] = []
        self.track = track
        self.completion_record: CompletionRecord | None = None
        self.elsewhere: Sequence[str] = ()  # the stages under way in another process
        self._open: list[str] = []

    @property
    def own_record(self) -> CompletionRecord:
        """The record of the completion, which begins where it is first asked for."""
        self.completion_record = self.completion_record or CompletionRecord()
        return self.completion_record

    @property
    def under_way(self) -> list[str]:
        """The stages under way. From any thread."""
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
        """A stage that began at `started` is over now."""
        track = f"{self.track} reference" if stage == Stage.RAG_32B else self.track
        span = Span(name=stage, started=started, ended=time.perf_counter(), track=track, failed=failed)
        self.adopt([span])

    def adopt(self, spans: Sequence[Span], record: CompletionRecord | None = None) -> None:
        """These stages are over, perhaps in another process, with its notes."""
        if record is not None:
            self.own_record.add(record)
        self.spans.extend(spans)
        self.seconds.update({span.name: span.seconds for span in spans})


def place_of(error: BaseException) -> str:
    """Where an error was raised: `rewards.py:31`, with the whole path. The last in no library, if there is one."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    foreign = [place for place in places if not place[0].startswith(_LIBRARIES) and "-packages" not in place[0]]
    return "{}:{}".format(*(foreign or places)[-1]) if places else "an unknown place"


_LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]), "<frozen")


class FaultLog:
    """Logs each fault in code once, by its place and without its message, which may hold a customer's text."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def conclude(self, scoring: "asyncio.Task[Reward]") -> Reward:
        """The reward of a `score` that returned, raised or was cancelled."""
        if scoring.cancelled():
            return missing(Outcome.INFRA, "cancelled")
        error = scoring.exception()
        if error is None:
            return scoring.result()
        self.log("the reward", error)
        return missing(Outcome.INFRA, f"raised_{type(error).__name__}")

    def log(self, what: str, error: BaseException) -> None:
        name, place = type(error).__name__, place_of(error)
        self.log_once(f"{what} raised {name} at {place}; completions it happens to are missing")

    def log_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            logger.error(line)
