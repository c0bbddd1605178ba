"""The reward and its event loop, callable from the trainer's thread.

Owns the loop's thread, the way from another thread to it, and what an interrupted wait means. It does not own how a
completion is scored (the reward), nor when a batch begins and which groups are waited for (the rollouts).
"""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from salesrl_trl.errors import ServiceError
from salesrl_trl.reward.apart import Apart
from salesrl_trl.reward.base import BatchedReward
from salesrl_trl.reward.batch import CANCEL_GRACE_S, BatchResult, Completion, RewardBatch
from salesrl_trl.reward.remote import RemoteReward
from salesrl_trl.timing import Span, TimingContext

T = TypeVar("T")


class RewardDesk:
    """Scores batches for a caller that is not on an event loop.

    TRL gets `functions` as its reward functions. A trainer that scores earlier than TRL asks does it in three steps:

        batch = desk.begin(rows)                  # then desk.start(batch, place, text), as completions come
        result = desk.result(batch, completions)  # waits; starts what has not been started with the same text
        with desk.answering(result):
            rewards = super()._calculate_rewards(...)

    All methods may be called from any thread but the loop's own.

    Args:
        reward (`BatchedReward`):
            Scores the completions. From now on it is used on the desk's loops alone.
    """

    def __init__(self, reward: BatchedReward) -> None:
        self.reward = reward
        """For its names and places, which may be read from any thread."""
        self._answer: BatchResult | None = None
        self._warming_up: Future[dict[str, float | ServiceError]] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
        self._thread.start()
        self._apart: Apart | None = None
        if not isinstance(reward, RemoteReward):  # whose code runs in its own process
            reward.apart = self._apart = Apart(reward.deadline_s, reward.batches.cut_off)

    @property
    def functions(self) -> "list[RewardColumn]":
        """A function for each number that TRL weighs and logs by itself. They answer inside `answering` alone."""
        return [RewardColumn(self, name, logged_as) for name, logged_as in self.reward.function_names.items()]

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

    def begin(self, rows: Sequence[Any], group: int = 1) -> RewardBatch:
        """A batch of completions to these rows, none of which is started yet. As `OpenBatches.begin`."""
        return self.reward.batches.begin(rows, group)

    def start(self, batch: RewardBatch, place: int, completion: Completion, token_ids: Sequence[int] = ()) -> None:
        """Begin to score the completion at `place`. Does not wait."""
        self._loop.call_soon_threadsafe(batch.start, place, completion, token_ids)

    def start_all(
        self,
        batch: RewardBatch,
        completions: Sequence[Completion],
        token_ids: Sequence[Sequence[int]] = (),
        rows: Sequence[Any] = (),
    ) -> None:
        """Begin to score all completions that have not been started with the same text. Does not wait.

        Args:
            batch (`RewardBatch`):
                From `begin`.
            completions, token_ids, rows (`Sequence`):
                As in `RewardBatch.start_all`.
        """
        self._loop.call_soon_threadsafe(batch.start_all, completions, token_ids, rows)

    def wait(self, batch: RewardBatch, groups: Sequence[Sequence[int]]) -> None:
        """Wait until all rewards of one of the groups are in. An interrupted wait cancels the batch.

        Args:
            batch (`RewardBatch`):
                From `begin`.
            groups (`Sequence[Sequence[int]]`):
                Places that belong together. Without any group there is nothing to wait for.
        """
        self._run(lambda: batch.settled(groups))

    def result(self, batch: RewardBatch, completions: Sequence[Completion]) -> BatchResult:
        """Wait for all rewards of a batch, and report on it. The desk forgets the batch then.

        A completion whose text is another one than was started is scored anew. An interrupted wait cancels the batch.

        Args:
            batch (`RewardBatch`):
                From `begin`.
            completions (`Sequence`):
                The batch's completions as TRL has them, one for each place.
        """
        return self._run(lambda: self.reward.result(batch, completions))

    def give_up(self) -> None:
        """Cancel every batch without a result, and forget it."""
        for batch in self.reward.batches:
            self._loop.call_soon_threadsafe(self.reward.batches.give_up, batch)

    def fetch_references(self, rows: Iterable[int]) -> None:
        """Ask for the reference answers of these rows before their completions come. Does not wait."""
        post = self._loop.call_soon_threadsafe if self._apart is None else self._apart.post
        post(self.reward.fetch_references, list(rows))

    def cut_off(self, reason: str) -> None:
        """Score no more: completions without a reward, and all later ones, are missing with this reason code. Does not
        wait, so that a signal handler may call it."""
        self._loop.call_soon_threadsafe(self.reward.batches.cut_off, reason)

    def resume(self) -> None:
        """Score again what begins from now on."""
        self.reward.batches.resume()

    def status(self) -> str:
        """The state of the oldest batch, in words for the console."""
        if self._answer is not None:  # TRL gathers over all ranks inside `answering`
            return "this rank's are scored, another's may be out"
        held_by = "" if self._apart is None else self._apart.told()
        return held_by or self.reward.batches.status()

    def unreported_spans(self) -> list[Span]:
        """The stages of all batches without a result. A stage that is under way counts as failed."""
        return self.reward.unreported_spans()

    def begin_warm_up(self, timed: TimingContext) -> None:
        """Ask every service once, and do not wait. `warm_up` has the answers.

        Args:
            timed (`TimingContext`):
                Times it, on the loop's thread.
        """
        self._warming_up = self._begin(timed(self._warm_up))

    def warm_up(self) -> dict[str, float | ServiceError]:
        """Ask every service once, unless that has begun, and wait for it.

        Returns:
            `dict[str, float | ServiceError]`: by service, the seconds of its answer, or its error with the place.
        """
        begun, self._warming_up = self._warming_up, None
        return _result(begun or self._begin(self._warm_up))

    async def _warm_up(self) -> dict[str, float | ServiceError]:
        warm_up = self.reward.warm_up
        return await (warm_up() if self._apart is None else self._apart.call(warm_up))

    def close(self) -> None:
        """Cancel what is under way, close the reward's connections, and end the loop. Nothing can be scored after."""
        if not self._thread.is_alive():
            return
        if self._apart is None:
            self._run(self.reward.aclose)
        else:
            self.give_up()
            self._run(_cancel_the_others)
            self._apart.close(self.reward.aclose)
            self.reward.apart = None
        self._run(_cancel_the_others)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, call: Callable[[], Awaitable[T]]) -> T:
        return _result(self._begin(call))

    def _begin(self, call: Callable[[], Awaitable[T]]) -> "Future[T]":
        async def called() -> T:
            return await call()

        return asyncio.run_coroutine_threadsafe(called(), self._loop)


class RewardColumn:
    """The numbers of one reward function of a batch that is scored, as a reward function of TRL's.

    Args:
        desk (`RewardDesk`):
            Has them.
        name (`str`):
            Name of the function.
        logged_as (`str`):
            TRL names its metrics so.
    """

    def __init__(self, desk: RewardDesk, name: str, logged_as: str) -> None:
        self._desk = desk
        self._name = name
        self.__name__ = logged_as

    def __call__(self, **_: object) -> list[float | None]:
        return self._desk.column(self._name)


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
