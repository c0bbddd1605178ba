"""The rewards of a batch while they come in: started one by one, awaited together or group by group.

Owns the tasks of a batch, the time that each may take, and the report of a batch. The reward (`base`) owns how a
single completion is scored. Methods are called on the event loop's thread, unless they say otherwise.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

from salesrl_trl.ground.surroundings import here
from salesrl_trl.names import Stage
from salesrl_trl.recording.completion_record import Call
from salesrl_trl.reward.judge.base import JudgeRecord, ProviderUsage
from salesrl_trl.reward.scoring import missing
from salesrl_trl.reward.service.deadline import deadline
from salesrl_trl.reward.stage_times import StageTimes, TimeRange, time_of
from salesrl_trl.timing import Span
from salesrl_trl.types import Outcome, Reward

T = TypeVar("T")
Completion: TypeAlias = str | Sequence[Mapping[str, Any]]
"""As TRL has it: a text, or in the conversational form a list of messages."""

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 1.0
"""Longest wait for a call that was cancelled. After it the step goes on without the call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReport:
    """Times, traffic and verdicts of a batch, beside its rewards."""

    seconds: float
    """Seconds from the first call to the last answer."""
    judge_seconds: float
    """Seconds from the first request for a verdict to the last verdict."""
    usage: Mapping[str, ProviderUsage] = field(default_factory=dict)
    """Usage by judge provider."""
    traffic: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Counts by service, then by the names of `transport.TRAFFIC` and `"slots"`."""
    records: Sequence[JudgeRecord] = ()
    """Every verdict."""
    cache_hits: Mapping[str, int] = field(default_factory=lambda: {"answers": 0, "references": 0})
    """Calls saved, for `"answers"` and `"references"`."""
    started: float = 0.0
    """When the batch began, on `time.perf_counter`'s scale."""
    spans: Sequence[Span] = ()
    """Every stage of every completion, on a track of its place in the batch; references on one beside it."""
    waits: Sequence[tuple[float, float]] = ()
    """When the trainer waited for this batch, on the same scale."""
    calls: Sequence[Call] = ()
    """Where calls are recorded: those that no completion waited for, such as references ahead."""


NOTHING_SCORED = BatchReport(seconds=0.0, judge_seconds=0.0)
"""The report where there was no batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchResult:
    """The rewards of a batch, and what happened beside them."""

    rewards: tuple[Reward, ...]
    """One for each completion, in the batch's order."""
    report: BatchReport
    """Times, spans, and all traffic since the last report."""

    @property
    def values(self) -> list[float | None]:
        """A number for each completion, or `None` where it could not be scored: TRL's form."""
        return [reward.value for reward in self.rewards]

    def column(self, function: str) -> list[float | None]:
        """The numbers of one of several reward functions, or those of the only one. `None` for every completion that
        could not be scored: where one of its numbers is missing, the others would stand for all of them."""
        return [
            None if reward.value is None else reward.by_function.get(function, reward.value) for reward in self.rewards
        ]

    def table(self, functions: Iterable[str]) -> list[list[float]]:
        """The numbers of these functions, NaN for a missing one: a row for each completion."""
        columns = [self.column(function) for function in functions]
        return [[math.nan if each is None else each for each in row] for row in zip(*columns, strict=True)]

    def log(
        self,
        log_extra: Callable[[str, list[Any]], None],
        log_metric: Callable[[str, float], None],
        components: Sequence[str] | None = None,
    ) -> None:
        """Hand TRL what functions logged for these completions.

        Args:
            log_extra, log_metric (`Callable`):
                TRL's own.
            components (`Sequence[str]`, *optional*):
                Components for TRL's table of completions. With them it shows outcome and reason too.
        """
        for name in dict.fromkeys(name for reward in self.rewards for name in reward.columns):
            log_extra(name, [reward.columns.get(name) for reward in self.rewards])
        if components is not None:
            log_extra("outcome", [reward.outcome.value for reward in self.rewards])
            log_extra("reason", [reward.reason for reward in self.rewards])
            for name in components:
                log_extra(name, [reward.components.get(name) for reward in self.rewards])
        for reward in self.rewards:
            for name, value in reward.metrics:
                log_metric(name, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A completion to score, and its place among the others."""

    row: Any
    """What the reward keeps of the dataset's row: `BatchedReward.row_of`."""
    completion: Completion
    """As TRL has it."""
    token_ids: Sequence[int] = ()
    """Its tokens. Empty where nobody gave them."""
    batch: int = 0
    """Number of its batch. No two batches of a process have the same."""
    place: int = 0
    """Its place in the batch."""
    size: int = 1
    """Completions in the batch."""
    group: int = 1
    """Completions of a prompt. They are neighbours."""

    @property
    def text(self) -> str:
        """The policy's text."""
        return completion_text(self.completion)


Chain = Callable[[Sample, StageTimes], Awaitable[Reward]]
"""Scores one completion, and times its stages."""


class RewardBatch:
    """The rewards of one batch while they come in.

    Each completion has `deadline_s` from the moment it is started, and with it all that are scored together with it.
    One that is not scored by then is cancelled, and missing with the reason `"deadline"`. So a batch takes at most
    `deadline_s` from its last start.

    Args:
        rows (`Sequence`):
            What the reward keeps of each completion's row.
        chain (`Chain`):
            Scores one completion.
        conclude (`Callable[[asyncio.Task[Reward]], Reward]`):
            Makes the reward of a chain that returned, raised or was cancelled.
        deadline_s (`float`):
            Seconds a completion may take.
        lane (`int`, *optional*, defaults to `0`):
            Number among the batches in flight. Each lane has tracks of its own in the trace.
        record (`Callable[[Any, str | None, Reward], None]`, *optional*):
            Called with the row, the text and the reward of each completion that is settled.
        number (`int`, *optional*, defaults to `0`):
            Number of the batch.
        group (`int`, *optional*, defaults to `1`):
            Completions of a prompt.
        unit (`int`, *optional*, defaults to `1`):
            Neighbours that are scored together: 1, `group` or all.
        late (`Callable[[], str]`, *optional*):
            Returns the reason of a completion whose time is up. `"deadline"` when not given.
    """

    def __init__(
        self,
        rows: Sequence[Any],
        chain: Chain,
        conclude: Callable[["asyncio.Task[Reward]"], Reward],
        deadline_s: float,
        lane: int = 0,
        record: Callable[[Any, str | None, Reward], None] = lambda *_: None,
        *,
        number: int = 0,
        group: int = 1,
        unit: int = 1,
        late: Callable[[], str] = lambda: "deadline",
    ) -> None:
        self._context = here()  # of the thread that begins the batch: the main one
        self._late_reason = late
        self.lane = lane
        self.rows = tuple(rows)
        self.number = number
        self._group = group
        self._unit = unit
        self.rewards: list[Reward | None] = [None] * len(self.rows)
        """The rewards so far, by place. May be read from any thread."""
        self.times = TimeRange()
        """From the first start to the last reward so far. May be read from any thread."""
        self.waits: list[tuple[float, float]] = []
        self._chain = chain
        self._conclude = conclude
        self._record = record
        self._deadline_s = deadline_s
        self.stages = [self._stages_of(place) for place in range(len(self.rows))]
        self._samples: list[Sample | None] = [None] * len(self.rows)
        self._chains: dict[int, asyncio.Task[Reward]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._late: dict[int, str] = {}  # the reason of each
        self._changed: asyncio.Future[None] | None = None
        self._cut_off: str | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def is_settled(self, places: Sequence[int] | None = None) -> bool:
        """Whether the rewards at `places`, or all, are in. From any thread."""
        # The last ones are usually the last to come: from the end, most looks see one that is not there at once.
        return all(
            self.rewards[place] is not None for place in reversed(range(len(self)) if places is None else places)
        )

    def start(self, place: int, completion: Completion, token_ids: Sequence[int] = ()) -> None:
        """Begin to score the completion at `place`. Does nothing where this very one is under way or scored. Where it
        takes the place of another one, those that are scored together with it begin again."""
        known = self._samples[place]
        if known is not None and _same(known.completion, completion):
            return
        self._samples[place] = Sample(
            row=self.rows[place],
            completion=completion,
            token_ids=token_ids,
            batch=self.number,
            place=place,
            size=len(self),
            group=self._group,
        )
        first = place - place % self._unit
        together = range(first, min(first + self._unit, len(self)))
        for each in [place] if known is None else together:
            if (sample := self._samples[each]) is not None:
                if known is not None:  # that score is of another text, or beside one
                    self._drop(each)
                    self.stages[each] = self._stages_of(each)
                self._begin(each, sample)
        if all(self._samples[each] is not None for each in reversed(together)):  # as in `is_settled`
            self._start_timers(together)

    def _begin(self, place: int, sample: Sample) -> None:
        self._samples[place] = sample
        if self._cut_off is not None:
            self._settle(place, missing(Outcome.INFRA, self._cut_off, {}))
            return
        if self.times.first is None:
            self.times.first = time.perf_counter()
        chain = self._context.run(self._scoring, sample)
        self._chains[place] = chain
        chain.add_done_callback(partial(self._ended, place))

    def _scoring(self, sample: Sample) -> "asyncio.Task[Reward]":
        with deadline(self._deadline_s):
            return asyncio.ensure_future(self._chain(sample, self.stages[sample.place]))

    def start_all(
        self, completions: Sequence[Completion], token_ids: Sequence[Sequence[int]] = (), rows: Sequence[Any] = ()
    ) -> None:
        """Begin to score all completions that are not scored yet.

        Args:
            completions (`Sequence`):
                One for each place: texts, or TRL's conversational form.
            token_ids (`Sequence[Sequence[int]]`, *optional*):
                Their tokens.
            rows (`Sequence`, *optional*):
                Rows in place of those with which the batch began, where none is started yet.
        """
        self.rows = tuple(rows) or self.rows
        for place, completion in zip(range(len(self)), completions, strict=True):
            self.start(place, completion, token_ids[place] if token_ids else ())

    async def settled(self, groups: Sequence[Sequence[int]]) -> None:
        """Wait until all places of one of the groups are settled. One waiter at a time.

        A waiter that is cancelled cancels the whole batch.
        """
        began = time.perf_counter()
        try:
            while groups and not any(self.is_settled(group) for group in groups):
                self._changed = asyncio.get_running_loop().create_future()
                await self._changed
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            self._changed = None
            self.waits.append((began, time.perf_counter()))

    def cut_off(self, reason: str) -> None:
        """Score no more: completions that are not settled, and all later ones, are missing with this reason."""
        self._cut_off = reason
        for place in range(len(self.rows)):
            if self.rewards[place] is None:
                self._drop(place)
                self._settle(place, missing(Outcome.INFRA, reason, self.stages[place].seconds))

    def cancel(self) -> None:
        """Cancel what is under way, and the call that waits for it. No reward is set."""
        for place in list(self._chains):
            self._drop(place)
        if self._changed is not None:
            self._changed.cancel()

    def under_way(self) -> list[str]:
        """The stages under way, one entry for each completion and stage. From any thread."""
        return [stage for stages in self.stages for stage in stages.under_way]

    def report(self) -> BatchReport:
        """The batch's times. A reward with services adds what these did (`BatchedReward.drained`)."""
        spans = [span for stages in self.stages for span in stages.spans]
        return BatchReport(
            seconds=self.times.seconds,
            judge_seconds=time_of(Stage.JUDGE, spans).seconds,
            started=self.times.first or 0.0,
            spans=spans,
            waits=tuple(self.waits),
        )

    def spans_so_far(self) -> list[Span]:
        """The stages so far. One that is under way counts as failed. From any thread."""
        return [span for stages in self.stages for span in stages.so_far()]

    def _ended(self, place: int, chain: "asyncio.Task[Reward]") -> None:
        if self._chains.get(place) is chain and place not in self._late:
            self._settle(place, self._conclude(chain))
            return
        if not chain.cancelled():
            chain.exception()  # marked as seen: a late or dropped one concerns nobody
        self._settle_late(place, chain)

    def _overdue(self, place: int) -> None:
        """A completion's time is up: cancel it. It is missing once it has ended, or after `CANCEL_GRACE_S`."""
        del self._timers[place]
        self._late[place] = self._late_reason()
        chain = self._chains[place]
        chain.cancel()
        asyncio.get_running_loop().call_later(CANCEL_GRACE_S, self._settle_late, place, chain)

    def _settle_late(self, place: int, chain: "asyncio.Task[Reward]") -> None:
        if self._chains.get(place) is chain:
            self._settle(place, missing(Outcome.INFRA, self._late[place], self.stages[place].seconds))

    def _settle(self, place: int, reward: Reward) -> None:
        self._forget(place)
        self.rewards[place] = reward
        now = time.perf_counter()
        self.times.include(now, now)
        sample = self._samples[place]
        self._record(self.rows[place], None if sample is None else sample.text, reward)
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def _start_timers(self, places: Sequence[int]) -> None:
        """From now on the completions at these places have their time."""
        loop = asyncio.get_running_loop()
        for place in places:
            if place in self._timers:
                self._timers[place].cancel()
            if place in self._chains and place not in self._late:
                self._timers[place] = loop.call_later(self._deadline_s, self._overdue, place)

    def _stages_of(self, place: int) -> StageTimes:
        return StageTimes(f"reward {place} ahead {self.lane}" if self.lane else f"reward {place}")

    def _drop(self, place: int) -> None:
        """Cancel what is under way for a place, and forget its text and its reward."""
        chain = self._chains.get(place)
        self._forget(place)
        if chain is not None:
            chain.cancel()
        self.rewards[place] = None
        self._samples[place] = None

    def _forget(self, place: int) -> None:
        self._chains.pop(place, None)
        self._late.pop(place, None)
        timer = self._timers.pop(place, None)
        if timer is not None:
            timer.cancel()


def completion_text(completion: Completion) -> str:
    """The text of a completion: of its last message, if it is a list of messages."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"] if completion else "")


def _same(one: Completion | None, other: Completion) -> bool:
    """Whether two completions are the same. A text is the same as a single message that holds nothing else."""
    return one == other or (_plain(one) is not None and _plain(one) == _plain(other))


def _plain(completion: Completion | None) -> str | None:
    """The text of a completion that is nothing else."""
    if completion is None or isinstance(completion, str):
        return completion
    alone = len(completion) == 1 and completion[0].keys() <= {"role", "content"}
    return str(completion[0]["content"]) if alone else None
