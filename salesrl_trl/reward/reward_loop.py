"""A reward and its event loop, callable from the trainer's thread.

Owns the batches that have no result yet, the stop that holds for all of them, the thread of the loop, and what an
interrupted wait means. Does not own how a completion is scored (`scorer`), nor when a batch begins and which groups
are waited for. That belongs to its callers: the rollouts, `trainer`, `update.stopping`, commands without a trainer.
"""

import asyncio
import contextlib
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import gather_object

from salesrl_trl.errors import ServiceError, ServiceUnavailable
from salesrl_trl.reward.batch import (
    CANCEL_GRACE_S,
    BatchReport,
    BatchResult,
    Completion,
    Origin,
    RewardBatch,
)  # fmt: skip
from salesrl_trl.reward.remote import RemoteReward
from salesrl_trl.reward.scorer import Scorer
from salesrl_trl.reward.watched_loop import WatchedLoop
from salesrl_trl.timing import Span, TimingContext
from salesrl_trl.types import Example

logger = logging.getLogger(__name__)

T = TypeVar("T")

DRAIN_S = 3.0
"""Longest wait for the figures of services. They lie in this process."""


class RewardLoop:
    """Scores batches for a caller that is not on an event loop.

    TRL gets `functions` as its reward functions. A trainer that scores earlier than TRL asks does it in three steps:

        batch = loop.begin(rows)                  # then loop.start(batch, place, text), as completions come
        result = loop.result(batch, completions)  # waits; starts what has not been started with the same text
        with loop.answering(result):
            rewards = super()._calculate_rewards(...)

    All methods may be called from any thread but the loop's own. `reward` is used on the loops alone from now on, but
    for its names.
    """

    def __init__(self, reward: Scorer) -> None:
        self.reward = reward
        self._open: list[RewardBatch] = []  # in the order in which they began
        self._numbers = itertools.count()
        self._stopped: str | None = None  # the reason
        self._answer: BatchResult | None = None
        self._warming_up: Future[dict[str, float | ServiceError]] | None = None
        self._preparing: set[Future[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
        self._thread.start()
        # A user's code may hold up its event loop: it has one of its own, or a process of its own.
        is_remote = isinstance(reward, RemoteReward)
        self._watched = None if is_remote else WatchedLoop(reward.deadline_s, self._cut_off)

    # A batch, from its beginning to its result

    def begin(self, rows: Sequence[Example], group: int = 1, origin: Origin | None = None) -> RewardBatch:
        """A batch of completions to these rows, none of which is started yet. `group` neighbours are completions of a
        prompt."""
        taken = {batch.lane for batch in list(self._open)}
        lane = next(lane for lane in itertools.count() if lane not in taken)
        batch = self.reward.batch(
            rows, group, number=next(self._numbers), lane=lane, origin=origin, watched=self._watched
        )
        self._open.append(batch)  # before looking, for the loop's thread may stop all at this moment
        if self._stopped is not None:
            batch.cut_off(self._stopped)
        return batch

    def start(self, batch: RewardBatch, place: int, completion: Completion, token_ids: Sequence[int] = ()) -> None:
        """Begin to score the completion at `place`. Does not wait."""
        self._loop.call_soon_threadsafe(batch.start, place, completion, token_ids)

    def start_all(
        self,
        batch: RewardBatch,
        completions: Sequence[Completion],
        token_ids: Sequence[Sequence[int]] = (),
        rows: Sequence[Example] = (),
    ) -> None:
        """Begin to score all completions that have not been started with the same text. Does not wait."""
        self._loop.call_soon_threadsafe(batch.start_all, completions, token_ids, rows)

    def wait(self, batch: RewardBatch, groups: Sequence[Sequence[int]]) -> None:
        """Wait until all rewards of one of the groups are in. An interrupted wait cancels the batch."""
        self._run(batch.settled, groups)

    def result(self, batch: RewardBatch, completions: Sequence[Completion]) -> BatchResult:
        """Wait for all rewards of a batch, and report on it. The batch is not open any more then.

        A completion whose text is another one than was started is scored anew. An interrupted wait cancels the batch.
        """
        return self._run(self._result, batch, completions)

    async def _result(self, batch: RewardBatch, completions: Sequence[Completion]) -> BatchResult:
        batch.start_all(completions)
        await batch.settled([range(len(batch))])
        drained = await self._drained()
        self._close(batch)
        return batch.result(drained)

    async def _drained(self) -> BatchReport:
        if self._watched is None or self._watched.is_held:  # nothing else counts while its loop is held up
            return await self.reward.drain()
        draining = asyncio.ensure_future(self._watched.call(self.reward.drain))
        try:
            await asyncio.wait([draining], timeout=DRAIN_S)
        finally:
            draining.cancel()
        return draining.result() if draining.done() else await self.reward.drain()

    def prepare(self, rows: Sequence[Example]) -> None:
        """Ask for what these rows need before their completions come. Does not wait. Errors are left to the
        completions."""
        if self._stopped is None:
            preparing = self._submit(self._in_reward, self.reward.prepare, rows)
            self._preparing.add(preparing)
            preparing.add_done_callback(self._preparing.discard)

    def give_up(self) -> None:
        """Cancel every open batch, and forget it."""
        for batch in list(self._open):
            self._loop.call_soon_threadsafe(self._give_up, batch)

    def _give_up(self, batch: RewardBatch) -> None:
        batch.cancel()
        self._close(batch)

    def _close(self, batch: RewardBatch) -> None:
        with contextlib.suppress(ValueError):  # not a new list: another thread may append to it now
            self._open.remove(batch)

    def cut_off(self, reason: str) -> None:
        """Score no more: completions without a reward, and all later ones, are missing with this reason code. Does not
        wait, so that a signal handler may call it."""
        self._loop.call_soon_threadsafe(self._cut_off, reason)

    def _cut_off(self, reason: str) -> None:
        self._stopped = reason
        for batch in list(self._open):
            batch.cut_off(reason)

    def resume(self) -> None:
        """Score again what begins from now on."""
        self._stopped = None

    # TRL's questions

    @property
    def functions(self) -> "list[RewardColumn]":
        """A function for each number that TRL weighs and logs by itself. They answer inside `answering` alone."""
        return [RewardColumn(self, name, logged_as) for name, logged_as in self.reward.names.functions.items()]

    def column(self, name: str) -> list[float | None]:
        """The numbers of one function, for TRL, of the result that is answered with."""
        assert self._answer is not None, "TRL asks inside `answering` alone"
        return self._answer.column(name)

    @contextlib.contextmanager
    def answering(self, result: BatchResult) -> Iterator[None]:
        """Calls inside the block are answered with this result."""
        self._answer = result
        try:
            yield
        finally:
            self._answer = None

    # What is shown while it waits

    def status(self) -> str:
        """The oldest batch in words for the console: its completions by stage."""
        if self._answer is not None:  # TRL gathers over all ranks inside `answering`
            return "this rank's are scored, another's may be out"
        if self._watched is not None and (held_up := self._watched.held_up()):
            return held_up
        batches = list(self._open)
        if not batches:
            return "none is being scored"
        batch = batches[0]
        behind = f"; {len(batches) - 1} more batches in flight" if len(batches) > 1 else ""
        if batch.times.first is None:
            return f"none is being scored yet{behind}"
        if batch.is_settled():
            return f"this rank's are scored, another's may be out{behind}"
        stages = ", ".join(f"{number} in {name}" for name, number in Counter(batch.under_way()).items())
        return f"of {len(batch)} completions {stages or 'some are out'}{behind}"

    def unreported_spans(self) -> list[Span]:
        """The stages of the open batches, for example of one that was cut off. One under way counts as failed."""
        return [span for batch in list(self._open) for span in batch.spans_so_far()]

    # Before the first batch, and after the last

    def begin_warm_up(self, timed: TimingContext) -> None:
        """Ask every service once, and do not wait. `warm_up` has the answers. `timed` times it, on the loop's
        thread."""
        self._warming_up = self._submit(timed(partial(self._in_reward, self.reward.warm_up)))

    def warm_up(self) -> dict[str, float | ServiceError]:
        """Ask every service once, unless that has begun, and wait for it. Returns by service the seconds of its
        answer, or its error with the place."""
        begun, self._warming_up = self._warming_up, None
        return _result(begun or self._submit(self._in_reward, self.reward.warm_up))

    def close(self) -> None:
        """Cancel what is under way, close the reward's connections, and end the loop. Nothing can be scored after."""
        if not self._thread.is_alive():
            return
        self.give_up()
        if self._watched is None:
            self._run(self.reward.aclose)
        else:
            self._run(_cancel_the_others)
            self._watched.close(self.reward.aclose)
        self._run(_cancel_the_others)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # The way to the loops

    async def _in_reward(self, call: Callable[..., Coroutine[Any, Any, T]], *arguments: object) -> T:
        """A call of the reward, where its code runs."""
        return await (call(*arguments) if self._watched is None else self._watched.call(call, *arguments))

    def _run(self, call: Callable[..., Coroutine[Any, Any, T]], *arguments: object) -> T:
        return _result(self._submit(call, *arguments))

    def _submit(self, call: Callable[..., Coroutine[Any, Any, T]], *arguments: object) -> "Future[T]":
        async def called() -> T:
            return await call(*arguments)

        return asyncio.run_coroutine_threadsafe(called(), self._loop)


class RewardColumn:
    """The numbers of one reward function of a batch that is scored, as a reward function of TRL's, which names its
    metrics after `logged_as`."""

    def __init__(self, reward_loop: RewardLoop, name: str, logged_as: str) -> None:
        self._reward_loop = reward_loop
        self._name = name
        self.__name__ = logged_as

    def __call__(self, **_: object) -> list[float | None]:
        return self._reward_loop.column(self._name)


def _result(waiting: "Future[T]") -> T:
    """Wait for a coroutine on the loop. Where the wait is interrupted, the coroutine is cancelled."""
    try:
        return waiting.result()
    except BaseException:
        waiting.cancel()
        raise


async def _cancel_the_others() -> None:
    """Cancel every other task of the running loop. One that goes on all the same is left behind."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CANCEL_GRACE_S)


def warm_up(reward_loop: RewardLoop, report: Callable[[str], object] = logger.info) -> None:
    """Ask every service once, and report how long it took; a collective.

    Raises `ServiceUnavailable` if the 8B endpoint, or every judge, did not answer; on all ranks alike.
    """
    answers: dict[str, float | ServiceError] = {}
    try:
        answers = reward_loop.warm_up()
        unusable = [str(error) for error in reward_loop.reward.names.unusable(answers)]
    except ServiceError as error:  # of the reward process itself: the other ranks wait below
        unusable = [str(error)]
    figures = [answer.code if isinstance(answer, ServiceError) else answer for answer in answers.values()]
    everywhere, failures = gather_object([figures]), gather_object(unusable)
    if PartialState().is_main_process and all(everywhere):
        for name, *results in zip(answers, *everywhere, strict=True):
            codes = sorted({result for result in results if isinstance(result, str)})
            report(f"[WarmUp] {name}: {', '.join(codes) if codes else f'{max(results):.2f} s'}")
    if failures:
        raise ServiceUnavailable(
            f"the services did not pass their warm-up, so nothing could be scored: {failures[0]} Mend the service and "
            "launch again (`warm_up_services: false` leaves the check out)."
        )
