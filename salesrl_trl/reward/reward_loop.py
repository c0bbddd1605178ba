"""A reward and its event loops, callable from the trainer's thread.

Owns the open batches, stopping them all, and the warm-up verdict shared by all ranks.
"""

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from accelerate import PartialState
from accelerate.utils import gather_object

from salesrl_trl.errors import ServiceError, ServiceUnavailable
from salesrl_trl.names import StartUp
from salesrl_trl.reward.batch import BatchResult, Completion, Origin, RewardBatch, wait_for
from salesrl_trl.reward.scorer import Scorer
from salesrl_trl.service.event_loop import LoopThread, WatchedLoop, cancel
from salesrl_trl.service.flights import fallen
from salesrl_trl.timing import Spans, TimingContext
from salesrl_trl.types import Example

T = TypeVar("T")

logger = logging.getLogger(__name__)

DRAIN_S = 6.0  # longest wait for the services' counters


class RewardLoop:
    """Scores batches for synchronous callers. TRL receives `functions` as its reward functions. Call its methods from
    any thread except the loop's own. Only the loop uses `reward`, except for its names."""

    def __init__(self, reward: Scorer) -> None:
        self.reward = reward
        self.functions = [RewardColumn(self, *names) for names in reward.names.functions.items()]
        self.answer: BatchResult | None = None  # returned by calls of `functions`
        self.stopped: str | None = None  # if set, new batches are not scored, for this reason code
        self.meanwhile: Callable[[Callable[[], object]], None] | None = None
        """Work for a waiting thread until this condition holds or nothing is left to do. It counts as waiting."""
        self.by_second: frozenset[str] = frozenset()
        """The modes (see `Origin`) in which the second judge of `judge_meter` scores new batches."""
        self._open: dict[int, RewardBatch] = {}  # by number, oldest first
        self._numbers = itertools.count()
        self._warming_up: Future[dict[str, float | ServiceError]] | None = None
        self._batches = LoopThread("rewards")  # runs batches and deadlines
        self.post = self._batches.post  # calls a batch's method, e.g. `start`, without waiting
        self._calls = WatchedLoop()

    def begin(self, rows: Sequence[Example], group: int = 1, origin: Origin | None = None) -> RewardBatch:
        """Open a batch of completions for these rows, with `group` neighbouring completions per prompt."""
        taken = {batch.lane for batch in list(self._open.values())}
        lane = next(lane for lane in itertools.count() if lane not in taken)
        number = next(self._numbers)
        batch = RewardBatch(self.reward, rows, group, number=number, lane=lane, origin=origin, calls=self._calls)
        batch.by_second = origin is not None and origin.mode in self.by_second
        self._open[number] = batch  # before checking `stopped`, which another thread may set concurrently
        if self.stopped is not None:
            batch.cut_off(self.stopped)
        return batch

    def wait(self, batches: Sequence[RewardBatch], is_enough: Callable[[], object]) -> None:
        """Wait for rewards of these batches, see `batch.wait_for`. Interrupting the wait cancels them; after
        an interrupted `meanwhile`, `give_up` does."""
        began = time.perf_counter()
        if self.meanwhile is not None:
            self.meanwhile(is_enough)
        self._batches.run(wait_for(batches, is_enough, began))

    def result(self, batch: RewardBatch, completions: Sequence[Completion]) -> BatchResult:
        """Wait for all rewards of a batch and its report. A completion whose text has changed since it was started is
        rescored. Interrupting the wait cancels the batch."""

        async def scored() -> BatchResult:
            batch.start_all(completions)
            await wait_for([batch], batch.is_settled, began)
            draining = asyncio.ensure_future(self._calls.call(self.reward.drain))
            await asyncio.wait([draining], timeout=DRAIN_S)
            self._open.pop(batch.number, None)
            if draining.done():
                return batch.result(draining.result())
            draining.cancel()  # the loop is blocked: the next batch will report the counters
            return batch.result()

        began = time.perf_counter()
        if self.meanwhile is not None:
            self.post(batch.start_all, completions)
            self.meanwhile(batch.is_settled)
        return self._batches.run(scored())

    def prepare(self, rows: Sequence[Example]) -> None:
        """Prefetch what these rows need before their completions arrive. Does not wait, and raises nothing."""
        if self.stopped is None:
            self.call(self.reward.prepare, rows)

    def give_up(self, batches: Sequence[RewardBatch] | None = None) -> None:
        """Cancel and drop these open batches, or all of them."""

        def give_up(batch: RewardBatch) -> None:
            batch.cancel()
            self._open.pop(batch.number, None)

        for batch in list(self._open.values()) if batches is None else batches:
            self._batches.post(give_up, batch)

    def cut_off(self, reason: str) -> None:
        """Stop scoring: everything unsettled stays unscored for this reason. Does not wait, so signal handlers may
        call it."""
        self.stopped = reason
        for batch in list(self._open.values()):
            self._batches.post(batch.cut_off, reason)

    def call(self, function: Callable[..., Coroutine[object, object, T]], *arguments: object) -> "Future[T]":
        """Call a coroutine function on the loop that runs the reward's code. Does not wait."""
        return self._batches.submit(self._calls.call(function, *arguments))

    def status(self, generating: str = "") -> str:
        """Describe the oldest batch with a running stage for the console: completions by stage. Without one, returns
        `generating`, as in an evaluation."""
        for batch in list(self._open.values()):
            stages = Counter(stage for each in batch.stages for stage in each.under_way)
            if listed := ", ".join(f"{count} in {name}" for name, count in stages.items()):
                return "; ".join([f"{listed} (of {len(batch)} completions)", *(each.in_words() for each in fallen())])
        return generating or "no reward is under way on this rank"

    def begin_warm_up(self, timeline: Spans) -> None:
        """Start calling every service once. Does not wait; `warm_up` returns the answers."""

        async def timed() -> dict[str, float | ServiceError]:
            with TimingContext(StartUp.WARM_UP, timeline):
                return await self._calls.call(self.reward.warm_up)

        self._warming_up = self._batches.submit(timed())

    def warm_up(self) -> dict[str, float | ServiceError]:
        """Wait for `Scorer.warm_up`, starting it if `begin_warm_up` has not."""
        begun, self._warming_up = self._warming_up, None
        return (begun or self.call(self.reward.warm_up)).result()

    def close(self) -> None:
        """Cancel open batches, close the reward's connections and stop the loop. Nothing can be scored afterwards."""

        async def closed() -> None:
            await self._calls.aclose(self.reward.aclose)
            await cancel(asyncio.all_tasks() - {asyncio.current_task()})

        if not self._batches.loop.is_closed():
            self.give_up()
            self._batches.run(closed())
            self._batches.close()


class RewardColumn:
    """One reward function's numbers for TRL, which names its metrics after `logged_as`. Callable only while the loop
    holds an `answer`."""

    def __init__(self, reward_loop: RewardLoop, name: str, logged_as: str) -> None:
        self._reward_loop = reward_loop
        self.name = name
        self.__name__ = logged_as

    def __call__(self, /, **_: object) -> list[float | None]:  # columns may have any name
        assert self._reward_loop.answer is not None, "called without an `answer`"
        return self._reward_loop.answer.column(self.name)


def warm_up(reward_loop: RewardLoop, others: Iterable[Callable[[], Mapping[str, float | ServiceError]]] = ()) -> None:
    """Call every service once and log its response time; a collective. `others` call those of conversations.

    Raises `ServiceUnavailable` on all ranks if the 8B endpoint, every judge, or one of the others failed to answer on
    any rank.
    """
    answers: dict[str, float | ServiceError] = {}
    try:
        answers = reward_loop.warm_up()
        unusable = [str(error) for error in reward_loop.reward.names.unusable(answers)]
        for asked in [other() for other in others]:
            answers |= asked
            unusable += [str(answer) for answer in asked.values() if isinstance(answer, ServiceError)]
    except Exception as error:  # e.g. the reward process itself failed; the other ranks wait below
        unusable = [str(error) if isinstance(error, ServiceError) else repr(error)]
    figures = [answer.code if isinstance(answer, ServiceError) else answer for answer in answers.values()]
    everywhere, failures = gather_object([figures]), gather_object(unusable)
    if PartialState().is_main_process and all(everywhere):
        for name, *results in zip(answers, *everywhere, strict=True):
            codes = sorted({result for result in results if isinstance(result, str)})
            logger.info(f"[WarmUp] {name}: {', '.join(codes) if codes else f'{max(results):.2f} s'}")
    if failures:
        raise ServiceUnavailable(
            f"the services failed their warm-up, so nothing could be scored: {failures[0]} Fix the service and launch "
            "again (`warm_up_services: false` skips this check)."
        )
