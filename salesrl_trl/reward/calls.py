"""How a reward function is called: once for several completions, and in a thread if it is not async.

Owns the wait for the last of the completions, and the threads. `functions` owns what is called.
"""

import asyncio
import contextvars
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from salesrl_trl.ground.surroundings import enter
from salesrl_trl.reward.batch import Sample
from salesrl_trl.types import Reward

T = TypeVar("T")


class Together:
    """One call for completions that are scored together. It is made when the last of them is there.

    Args:
        size (`int`):
            Number of these completions.
        call (`Callable[[Sequence[Sample]], Awaitable[list[Reward]]]`):
            Scores them, in the order of their places.
    """

    def __init__(self, size: int, call: Callable[[Sequence[Sample]], Awaitable[list[Reward]]]) -> None:
        self._size = size
        self._call = call
        self._waiting: dict[int, tuple[Sample, asyncio.Future[Reward]]] = {}  # by place
        self._calling: asyncio.Task[None] | None = None
        self.started = 0.0
        """When the call began, on `time.perf_counter`'s scale."""

    @property
    def is_awaited(self) -> bool:
        """Whether a completion waits for its reward."""
        return bool(self._waiting)

    async def reward(self, sample: Sample) -> Reward:
        """The reward of one of the completions. When nobody waits any more, the call is cancelled."""
        answer: asyncio.Future[Reward] = asyncio.get_running_loop().create_future()
        mine = self._waiting[sample.place] = (sample, answer)
        if len(self._waiting) == self._size:
            asked = [self._waiting[place] for place in sorted(self._waiting)]
            self._calling = asyncio.ensure_future(self._run(asked))
        try:
            return await answer
        finally:
            if self._waiting.get(sample.place) is mine:
                del self._waiting[sample.place]
            if self._calling is not None and not self.is_awaited:
                self._calling.cancel()

    async def _run(self, asked: Sequence[tuple[Sample, asyncio.Future[Reward]]]) -> None:
        self.started = time.perf_counter()
        rewards: list[Reward] = []
        failed: BaseException | None = None
        try:
            rewards = await self._call([sample for sample, _ in asked])
        except Exception as error:  # each of them raises it
            failed = error
        for place, (_, answer) in enumerate(asked):
            if answer.done():
                continue
            if failed is not None:
                answer.set_exception(failed)
            else:
                answer.set_result(rewards[place])


async def in_a_thread(call: Callable[[], T]) -> T:
    """The result of a call in a thread of its own, with the caller's context and devices. A call that hangs holds up
    neither other calls nor the end of the program, as it would in a pool of threads."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    done: asyncio.Future[T] = loop.create_future()

    def settle(settled: Callable[[], None]) -> None:
        if not done.done():
            settled()

    def run() -> None:
        try:
            enter()
            result = call()
            settled = lambda: done.set_result(result)  # noqa: E731
        except BaseException as error:
            failed = RuntimeError("StopIteration") if isinstance(error, StopIteration) else error  # no future takes it
            settled = lambda: done.set_exception(failed)  # noqa: E731
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, settled)

    threading.Thread(target=context.run, args=(run,), name="reward function", daemon=True).start()
    return await done
