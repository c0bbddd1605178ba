"""The rewards of a batch as they arrive: started one by one, awaited together or group by group. Call methods on the
event loop's thread unless their docstring states otherwise."""

import asyncio
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from salesrl_trl.ground.process import here
from salesrl_trl.names import Stage
from salesrl_trl.reward.stage_times import FaultLog, StageTimes
from salesrl_trl.service.event_loop import WatchedLoop, cancel, deadline, retrieve
from salesrl_trl.telemetry.completion_record import Call
from salesrl_trl.timing import Span
from salesrl_trl.types import Answer, Example, JudgeRecord, Outcome, ProviderUsage, Reward, missing

logger = logging.getLogger(__name__)

Completion: TypeAlias = str | Sequence[Mapping[str, object]]
"""As in TRL: a string, or a list of messages in the conversational format."""
LogExtra: TypeAlias = Callable[[str, list[object]], None]
LogMetric: TypeAlias = Callable[[str, float], None]
LINE_KINDS = ("completions", "rag", "scoring")  # the first two quote customers


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReport:
    """Timings, traffic and verdicts of a batch, alongside its rewards."""

    seconds: float = 0.0  # from the first call to the last answer
    judge_seconds: float = 0.0  # from the first verdict request to the last verdict
    usage: Mapping[str, ProviderUsage] = field(default_factory=dict)
    judged_singly: int = 0  # completions judged one by one because the call for their group failed
    traffic: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Counts by service, then by the names in `transport.TRAFFIC` and `"slots"`."""
    records: Sequence[JudgeRecord] = ()
    cache_hits: Mapping[str, int] = field(default_factory=dict)  # by `names.CACHES`
    started: float = 0.0  # when the batch began, on the `time.perf_counter` clock
    spans: Sequence[Span] = ()
    """Every stage of every completion, on one trace track per position; references get a track of their own."""
    waits: Sequence[tuple[float, float]] = ()  # when the trainer waited for this batch, on the same clock
    calls: Sequence[Call] = ()
    """With recording: calls that no completion waited for, such as prefetched references."""


NOTHING_SCORED = BatchReport()


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchResult:
    """The rewards of a batch and its report."""

    rewards: tuple[Reward, ...]
    report: BatchReport

    @property
    def values(self) -> list[float | None]:
        """A number per completion, or `None` if it could not be scored, as TRL expects."""
        return [reward.value for reward in self.rewards]

    def column(self, function: str) -> list[float | None]:
        """The numbers of one reward function. `None` for a completion that any function failed to score; otherwise the
        remaining functions would count as its whole reward."""
        scored = [(reward.value, reward.by_function) for reward in self.rewards]
        return [None if value is None else numbers.get(function, value) for value, numbers in scored]

    def table(self, functions: Iterable[str]) -> list[list[float]]:
        """The numbers of these functions, one row per completion, NaN where unscored."""
        columns = [self.column(function) for function in functions]
        return [[math.nan if number is None else number for number in row] for row in zip(*columns, strict=True)]

    def log(self, log_extra: LogExtra, log_metric: LogMetric, components: Sequence[str] | None = None) -> None:
        """Pass what functions logged for these completions on to TRL. With `components`, TRL's completions table also
        shows these, the outcome and the reason."""
        logged = dict.fromkeys(name for reward in self.rewards for name in reward.columns)
        columns: dict[str, list[object]] = {name: [each.columns.get(name) for each in self.rewards] for name in logged}
        if components is not None:
            columns["outcome"] = [reward.outcome.value for reward in self.rewards]
            columns["reason"] = [reward.reason for reward in self.rewards]
            columns |= {name: [reward.components.get(name) for reward in self.rewards] for name in components}
        for name, values in columns.items():
            log_extra(name, values)
        for reward in self.rewards:
            for name, value in reward.metrics:
                if not (name.startswith("rewards/") and name.endswith(("/mean", "/std"))):  # names of TRL's own
                    log_metric(name, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The origin of a batch's completions, for rewards that look them up in a recording."""

    rows: Sequence[Example]  # as in the dataset, without columns that an environment or the sampler adds
    mode: str  # TRL's mode of the batch: `"train"` or `"eval"`
    step: int  # optimizer steps behind the weights that sampled the batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A completion to score, and its position in the batch."""

    row: Example  # the dataset row, including columns that an environment or the sampler added
    completion: Completion
    token_ids: Sequence[int] = ()  # empty if unknown
    batch: int = 0  # number of its batch, unique within the process
    place: int = 0
    size: int = 1
    group: int = 1  # completions per prompt; a prompt's completions are neighbours
    round: int = 0  # how often scoring of its unit has (re)started
    by_second: bool = False  # whether the second judge of `judge_meter` scores it
    failed: str | None = None  # reason to leave it unscored, whatever its reward
    origin: Origin | None = None  # not sent to a separate reward process

    @property
    def text(self) -> str:
        return completion_text(self.completion)


class SampleLines:
    """Logs lines of the selected `LINE_KINDS`. Without `scoring`, unscored completions are logged at level DEBUG."""

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
        """`[Scoring] train-0007 ok 0.80 (judge 0.80); rag_8b 0.31 s, judge 1.20 s`, preceded by the completion."""
        row_id = row_id_of(row) or "a row"
        if "completions" in self._kinds:
            logger.info(f"[Completion] {row_id}: {json.dumps(completion, ensure_ascii=False)}")
        if "scoring" not in self._kinds and (reward.value is not None or not logger.isEnabledFor(logging.DEBUG)):
            return
        value = "" if reward.value is None else f"{reward.value:.2f}"
        parts = ", ".join(f"{name} {part:.2f}" for name, part in reward.components.items() if part is not None)
        times = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in reward.seconds.items())
        what = filter(None, (row_id, reward.outcome.value, value, reward.reason, parts and f"({parts})"))
        level = logging.INFO if "scoring" in self._kinds else logging.DEBUG
        logger.log(level, f"[Scoring] {' '.join(what)}; {times}")


def row_id_of(row: Example) -> str | None:
    """The row's id; `launch.data.sources` assigns one where the dataset lacks it. `None` for streamed rows."""
    return None if row.get("id") is None else str(row["id"])


class Scores(Protocol):
    """What a batch requires of a `Scorer`, which is described there."""

    deadline_s: float
    lines: SampleLines
    faults: FaultLog

    def unit(self, group: int, size: int) -> int: ...

    async def score(self, sample: Sample, stages: StageTimes) -> Reward: ...


class RewardBatch:
    """The rewards of one batch as they arrive. A completion is settled once it is scored or counts as unscored.

    A unit is the set of neighbouring completions scored in one call. Each completion has `deadline_s` from when its
    whole unit has arrived. Scoring beyond that is cancelled, and the completion stays unscored.

    `group` is the number of completions per prompt. `lane` is the batch's index among those in flight; each lane has
    its own tracks in the trace. `calls` is the event loop that runs the reward, instead of the current one.
    """

    def __init__(
        self, reward: Scores, rows: Sequence[Example], group: int = 1, *, number: int = 0, lane: int = 0,
        origin: Origin | None = None, calls: WatchedLoop | None = None,
    ) -> None:  # fmt: skip
        self.rows = list(rows)
        self.number = number
        self.lane = lane
        self.rewards: list[Reward | None] = [None] * len(self.rows)
        """The rewards so far, by position. Readable from any thread."""
        ahead = f" ahead {lane}" if lane else ""
        self._tracks = [f"reward {place}{ahead}" for place in range(len(self.rows))]
        self.stages = [StageTimes(track) for track in self._tracks]
        self.began: float | None = None  # when the first started, on the `time.perf_counter` clock
        self.ended = [0.0] * len(self.rows)  # when each was settled, on the same clock
        self.waits: list[tuple[float, float]] = []
        self.by_second = False  # as in `Sample`, for completions not started yet
        self._context = here()  # of the thread that creates the batch: the main one
        self._reward = reward
        self._calls = calls
        self._group = group
        self._unit = reward.unit(group, len(self.rows))
        self._origin = origin
        self._samples: list[Sample | None] = [None] * len(self.rows)
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by place
        self._whole: dict[int, asyncio.Future[None]] = {}  # by a unit's first place: done once the unit has arrived
        self._rounds: Counter[int] = Counter()  # by a unit's first place: how often it has started
        self._changed: asyncio.Future[None] | None = None
        self._cut_off: str | None = None

    def start(
        self, place: int, completion: Completion, token_ids: Sequence[int] = (), row: Example | None = None,
        failed: str | None = None,
    ) -> None:  # fmt: skip
        """Start scoring the completion at `place`, unless this same completion is in progress or scored. If it
        replaces another one, its whole unit restarts. `row` replaces the row with which the batch was created. A
        completion that `failed` earlier stays unscored for that reason, whatever its reward."""
        # 1. Store everything its reward may ask for.
        before = self._samples[place]
        if before is not None and _same(before.completion, completion):
            return
        if row is not None:
            self.rows[place] = row
        self._samples[place] = Sample(
            row=self.rows[place], completion=completion, token_ids=token_ids, batch=self.number, place=place,
            size=len(self), group=self._group, origin=self._origin, failed=failed,
            by_second=self.by_second if before is None else before.by_second,
        )  # fmt: skip
        first = place - place % self._unit
        unit = range(first, min(first + self._unit, len(self)))
        if before is not None or first not in self._whole:
            self._whole[first] = asyncio.get_running_loop().create_future()
            self._rounds[first] += 1
        # 2. Start it, or restart its unit. A batch that was cut off starts nothing.
        for other in [place] if before is None else unit:
            if (sample := self._samples[other]) is None:
                continue
            if self._drop(other) or self.rewards[other] is not None:  # for another text, or alongside one
                self.rewards[other] = None
                self.stages[other] = StageTimes(self._tracks[other])
            why = self._cut_off or (sample.failed if self._unit == 1 else None)
            if why is not None:  # within a larger unit, the others may still compare themselves with it
                self._settle(other, missing(Outcome.INFRA, why))
                continue
            if self.began is None:
                self.began = time.perf_counter()
            scoring = self._scored(replace(sample, round=self._rounds[first]), self._whole[first])
            self._tasks[other] = self._context.run(asyncio.ensure_future, scoring)
        # 3. Start the unit's deadline once it is complete. The last positions usually arrive last.
        if all(self._samples[other] is not None for other in reversed(unit)) and not self._whole[first].done():
            self._whole[first].set_result(None)

    async def _scored(self, sample: Sample, whole: "asyncio.Future[None]") -> None:
        stages = self.stages[sample.place]
        # 1. Score it right away, while others are still being generated.
        with deadline(self._reward.deadline_s):
            score = self._reward.score
            asked = score(sample, stages) if self._calls is None else self._calls.call(score, sample, stages)
            scoring = asyncio.ensure_future(asked)
        scoring.add_done_callback(retrieve)  # if it finishes late
        try:
            # 2. Its deadline starts when its whole unit has arrived.
            either: set[asyncio.Future[Reward] | asyncio.Future[None]] = {scoring, whole}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([scoring], timeout=self._reward.deadline_s)
            if scoring.done():
                # 3. It was scored, or its code raised: then it stays unscored, and the location is logged once.
                reward = self._reward.faults.conclude(scoring)
            else:
                # 4. It is late. Code that ignores the cancellation is abandoned.
                await cancel([scoring])
                if held_by := "" if scoring.done() or self._calls is None else self._calls.held_by():
                    self._reward.faults.log_once(held_by)
                reward = missing(Outcome.INFRA, "blocked" if held_by else "deadline")
        finally:
            scoring.cancel()  # its text was replaced, or its batch was given up
        if sample.failed is not None:
            reward = missing(Outcome.INFRA, sample.failed)
        # 5. Settle it, which wakes whoever waits for its group.
        self._settle(sample.place, reward)

    def start_all(
        self, completions: Sequence[Completion], token_ids: Sequence[Sequence[int]] = (), rows: Sequence[Example] = (),
        failed: Sequence[str | None] = (),
    ) -> None:  # fmt: skip
        """Start scoring every completion not scored yet, one per place. `rows` replace those with which the batch was
        created, provided nothing has started yet. `failed`: as in `start`, or empty."""
        self.rows = list(rows) or self.rows
        for place, completion in zip(range(len(self)), completions, strict=True):
            own_ids, reason = token_ids[place] if token_ids else (), failed[place] if failed else None
            self.start(place, completion, own_ids, failed=reason)

    def take(self, parts: Sequence[tuple["RewardBatch", range]], waits: Sequence[tuple[float, float]]) -> None:
        """Adopt these settled completions, with their stages, from other batches. The trainer waited for them jointly:
        `waits`. From any thread. The batch's duration is that of its slowest completion, or the wait if longer."""
        held = [(batch, place) for batch, places in parts for place in places]
        self.rewards = [batch.rewards[place] for batch, place in held]
        self.stages = [batch.stages[place] for batch, place in held]
        self._samples = [batch._samples[place] for batch, place in held]
        longest = max(batch.ended[place] - (batch.began or 0.0) for batch, place in held)
        for batch, place in held:
            batch.stages[place] = StageTimes(batch._tracks[place])
        self.waits, last = [*waits], waits[-1][1]
        self.began, self.ended = min(last - longest, waits[0][0]), [last] * len(self)

    def has_settled(self, groups: Sequence[Sequence[int]]) -> bool:
        """Whether at least one group is fully settled, or the list is empty. From any thread."""
        return not groups or any(map(self.is_settled, groups))

    def __len__(self) -> int:
        return len(self.rows)

    def is_settled(self, places: Sequence[int] | None = None) -> bool:
        """Whether the rewards at `places`, by default all, have arrived. From any thread."""
        places = range(len(self)) if places is None else places
        return all(self.rewards[place] is not None for place in reversed(places))  # the last usually arrive last

    def is_equal(self, places: Sequence[int]) -> bool:
        """Whether the rewards at `places` have arrived and are all the same number. From any thread."""
        rewards = [self.rewards[place] for place in places]
        numbers = {None if reward is None else reward.value for reward in rewards}
        return len(numbers) == 1 and None not in numbers

    def cut_off(self, reason: str) -> None:
        """Stop scoring: completions not settled yet, and all later ones, stay unscored with this reason."""
        self._cut_off = reason
        for place, reward in enumerate(self.rewards):
            if reward is None:
                self._drop(place)
                self._settle(place, missing(Outcome.INFRA, reason))

    def cancel(self) -> None:
        """Cancel scoring in progress and the call that waits for it. Sets no reward."""
        for place in list(self._tasks):
            self._drop(place)
            self._samples[place] = None
        self._whole.clear()
        if self._changed is not None:
            self._changed.cancel()

    def result(self, drained: BatchReport = NOTHING_SCORED) -> BatchResult:
        """The rewards of a settled batch, its timings, and the services' activity (`Scorer.drain`)."""
        spans = [span for stages in self.stages for span in stages.spans]
        judged: dict[int, list[Span]] = {}  # by batch: adopted completions started in others
        for sample, stages in zip(self._samples, self.stages, strict=True):
            judgings = [span for span in stages.spans if span.name == Stage.JUDGE]
            judged.setdefault(self.number if sample is None else sample.batch, []).extend(judgings)
        took = (
            max(span.ended for span in judgings) - min(span.started for span in judgings)
            for judgings in judged.values()
            if judgings
        )
        report = replace(
            drained, seconds=max(max(self.ended, default=0.0) - (self.began or 0.0), 0.0),
            judge_seconds=max(took, default=0.0), spans=spans, started=self.began or 0.0, waits=tuple(self.waits),
        )  # fmt: skip
        return BatchResult(rewards=tuple(reward for reward in self.rewards if reward is not None), report=report)

    def _settle(self, place: int, reward: Reward) -> None:
        self._tasks.pop(place, None)
        self.ended[place] = time.perf_counter()
        self.rewards[place] = reward = replace(reward, seconds=self.stages[place].seconds)
        if self.began is None:  # the batch was cut off before anything started
            self.began = self.ended[place]
        sample = self._samples[place]
        self._reward.lines.scored(self.rows[place], None if sample is None else sample.text, reward)
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def _drop(self, place: int) -> bool:
        task = self._tasks.pop(place, None)
        return task is not None and task.cancel()


async def wait_for(batches: Sequence[RewardBatch], is_enough: Callable[[], object], began: float = 0.0) -> None:
    """Wait until `is_enough()`, which is checked again whenever a reward of these batches arrives. Supports one waiter
    at a time. Cancelling the waiter cancels the batches. `began`: when the wait began, if earlier."""
    began = began or time.perf_counter()
    try:
        while not is_enough():
            changed = asyncio.get_running_loop().create_future()
            for batch in batches:
                batch._changed = changed
            await changed
    except asyncio.CancelledError:
        for batch in batches:
            batch.cancel()
        raise
    finally:
        for batch in batches:
            batch._changed = None
            batch.waits.append((began, time.perf_counter()))


def completion_text(completion: Completion) -> str:
    """The text of a completion, of its last message, or of a conversation with a partner, whose sides have names."""
    if not isinstance(completion, str) and any(each.get("name") and each.get("role") != "tool" for each in completion):
        return "\n".join(map(_line, completion))
    return completion if isinstance(completion, str) else str(completion[-1].get("content", "") if completion else "")


def _line(message: Mapping[str, object]) -> str:
    """`"customer: That is too expensive."`. Further lines of a message are indented: none can pass for another's."""
    name = "".join(each if each.isalnum() else "_" for each in str(message.get("name") or message.get("role")))
    speaker = {"assistant": "seller", "tool": f"tool_{name}"}.get(str(message.get("role")), name)
    asked: Sequence[Mapping[str, object]] = message.get("tool_calls") or ()  # type: ignore[assignment]
    calls = [json.dumps(call.get("function", call), ensure_ascii=False) for call in asked]
    text = "\n".join(filter(None, [str(message.get("content") or ""), *calls]))
    return "\n  ".join(f"{speaker}: {text}".splitlines())


def conversation_of(completion: Completion) -> Sequence[Mapping[str, object]] | None:
    """The messages of a completion with several."""
    return None if isinstance(completion, str) or len(completion) < 2 else completion


def _same(known: Completion, other: Completion) -> bool:
    """Whether two completions are equal. A string equals a single message with that text."""
    is_text = conversation_of(known) is None and conversation_of(other) is None
    return known == other or (is_text and completion_text(known) == completion_text(other))
