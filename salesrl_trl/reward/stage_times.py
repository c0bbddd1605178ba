"""What is noted of single completions: times of stages, lines that `verbose` asks for, errors in a reward's code.

`batch` reports the times. An error costs its completion, is logged once by its place, and the run goes on. A line
quotes a customer only if its kind was asked for.
"""

import asyncio
import json
import logging
import re
import sysconfig
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

from salesrl_trl.names import Stage
from salesrl_trl.service.event_loop import told_to
from salesrl_trl.telemetry.completion_record import CompletionRecord
from salesrl_trl.timing import Span
from salesrl_trl.types import Answer, Example, Outcome, Reward, missing

T = TypeVar("T")


class StageTimes:
    """Times the stages of one completion. `track` is the line of the trace on which they are drawn."""

    def __init__(self, track: str) -> None:
        self.seconds: dict[str, float] = {}
        self.spans: list[Span] = []
        self.track = track
        self.completion_record: CompletionRecord | None = None
        self._open: dict[str, float] = {}
        self._waits_for: list[Callable[[], str]] = []
        self._elsewhere: dict[int, tuple[list[str], list[Span]]] = {}

    @property
    def own_record(self) -> CompletionRecord:
        """The record of the completion, which begins where it is first asked for."""
        self.completion_record = self.completion_record or CompletionRecord()
        return self.completion_record

    @property
    def under_way(self) -> list[str]:
        """The stages under way; where a call waits for a limit, that limit. From any thread."""
        here = [f"line for {limit()}" for limit in list(self._waits_for)] or [*self._open]
        return [*here, *(stage for stages, _ in list(self._elsewhere.values()) for stage in stages)]

    async def timed(self, call: Awaitable[T], stage: str) -> T:
        """Await `call` as a stage."""
        failed, started = True, time.perf_counter()
        self._open[stage] = started
        try:
            with told_to(self._waits_for):
                result = await call
            failed = False
            return result
        finally:
            self._open.pop(stage, None)  # another function of this name may have ended before
            self.record(stage, started, failed)

    def record(self, stage: str, started: float, failed: bool = False) -> None:
        """A stage that began at `started` is over now."""
        span = self._span(stage, started, failed)
        self.seconds[stage] = span.seconds
        self.spans.append(span)

    def show(self, call: int, under_way: list[str], spans: list[Span]) -> None:
        """What another process has reported of a call so far, in place of what it reported before."""
        self._elsewhere[call] = (under_way, spans)

    def adopt(self, call: int, spans: Sequence[Span] = (), record: CompletionRecord | None = None) -> None:
        """A call in another process is over: its stages and notes, if it could report them."""
        self._elsewhere.pop(call, None)
        if record is not None:
            self.own_record.add(record)
        self.spans.extend(spans)
        self.seconds.update({span.name: span.seconds for span in spans})

    def so_far(self) -> list[Span]:
        """The stages so far. One that is under way counts as failed. From any thread."""
        open_here = [self._span(stage, started, True) for stage, started in list(self._open.items())]
        elsewhere = [span for _, spans in list(self._elsewhere.values()) for span in spans]
        return [*self.spans, *open_here, *elsewhere]

    def _span(self, stage: str, started: float, failed: bool) -> Span:
        track = f"{self.track} reference" if stage == Stage.RAG_32B else self.track
        return Span(name=stage, started=started, ended=time.perf_counter(), track=track, failed=failed)


logger = logging.getLogger(__name__)

KINDS = ("completions", "rag", "scoring")  # the first two quote customers


class SampleLines:
    """Logs what happens to single completions: lines of these `KINDS`. Without `scoring`, completions without a number
    are logged at the level DEBUG."""

    def __init__(self, kinds: Collection[str] = ()) -> None:
        self._kinds = frozenset(kinds)

    def answer(self, row_id: str, service: str, seconds: float, answer: Answer) -> None:
        """`[RAG] train-0007 rag_8b 0.31 s, 3 passages, best 0.42: "The course costs ..."`."""
        if "rag" in self._kinds:
            best = f", best {max(passage.score for passage in answer.passages):.2f}" if answer.passages else ""
            summary = f"{len(answer.passages)} passages{best}: {json.dumps(answer.text, ensure_ascii=False)}"
            logger.info(f"[RAG] {row_id} {service} {seconds:.2f} s, {summary}")

    def no_answer(self, row_id: str, service: str, reason: str) -> None:
        """`[RAG] train-0007 rag_32b failed: rag_32b_timeout`."""
        level = logging.INFO if "rag" in self._kinds else logging.DEBUG
        logger.log(level, f"[RAG] {row_id} {service} failed: {reason}")

    def scored(self, row: Example, completion: str | None, reward: Reward) -> None:
        """`[Scoring] train-0007 ok 0.80 (judge 0.80); rag_8b 0.31 s, judge 1.20 s`, and before it the completion."""
        row_id = row_id_of(row) or "a row"
        if "completions" in self._kinds:
            logger.info(f"[Completion] {row_id}: {json.dumps(completion, ensure_ascii=False)}")
        if "scoring" in self._kinds:
            logger.info(self._line(row_id, reward))
        elif reward.value is None:
            logger.debug(self._line(row_id, reward))

    @staticmethod
    def _line(row_id: str, reward: Reward) -> str:
        value = "" if reward.value is None else f" {reward.value:.2f}"
        parts = ", ".join(f"{name} {part:.2f}" for name, part in reward.components.items() if part is not None)
        times = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in reward.seconds.items())
        reason = f" {reward.reason}" if reward.reason else ""
        return f"[Scoring] {row_id} {reward.outcome.value}{value}{reason}{f' ({parts})' if parts else ''}; {times}"


def row_id_of(row: Example) -> str | None:
    """The id of a row, which `launch.data.sources` gives to rows without one. `None` for rows of a stream."""
    return None if row.get("id") is None else str(row["id"])


def place_of(error: BaseException) -> str:
    """Where an error was raised: `rewards.py:31`, with the whole path. The last in no library, if there is one."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    foreign = [place for place in places if not _OF_A_LIBRARY.search(place[0])]
    return "{}:{}".format(*(foreign or places)[-1]) if places else "an unknown place"


_LIBRARIES = "|".join(re.escape(path) for path in (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1])))
_OF_A_LIBRARY = re.compile(rf"[/\\](site|dist)-packages[/\\]|^<frozen|^({_LIBRARIES})[/\\]")

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
            return missing(Outcome.INFRA, "cancelled")
        error = scoring.exception()
        if error is None:
            return scoring.result()
        self.log("the reward", error)
        return missing(Outcome.INFRA, f"raised_{type(error).__name__}")

    def log(self, what: str, error: BaseException) -> None:
        """Log an error in a reward's code, once for each place."""
        name, place = type(error).__name__, place_of(error)
        hint = _OF_ONE_THREAD if any(phrase in str(error) for phrase in _TIED) else ""
        self.log_once(f"{what} raised {name} at {place}; completions it happens to are missing{hint}")

    def log_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            logger.error(line)
