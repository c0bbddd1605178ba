"""The child of `remote`: a reward, and one socket for questions to it.

    python -m salesrl_trl.reward.worker FD LOG_LEVEL

It ends when the other side of the socket is gone, and leaves signals to the parent.
"""

import asyncio
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from salesrl_trl.errors import ServiceError
from salesrl_trl.reward.batch import Sample
from salesrl_trl.reward.remote import Channel, InHand, Said
from salesrl_trl.reward.scorer import Scorer
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.reward.watched_loop import WatchedLoop
from salesrl_trl.service.event_loop import deadline
from salesrl_trl.telemetry.logs import hide_lines
from salesrl_trl.types import Reward

logger = logging.getLogger(__name__)

EXIT_BLOCKED = 70


class Worker:
    def __init__(self, reward: Scorer, channel: Channel) -> None:
        self._reward = reward
        self._calls = WatchedLoop(reward.deadline_s, _end)
        self._channel = channel
        self._in_hand: dict[int, tuple[asyncio.Task[Reward], StageTimes]] = {}

    async def run(self, messages: AsyncIterator[Any]) -> None:
        """Answer until the parent is gone."""
        others: set[asyncio.Task[None]] = set()
        async for kind, number, *what in messages:
            match kind:
                case "ping":  # it is alive, and at this
                    scored = [(at, stages) for at, (_, stages) in self._in_hand.items()]
                    in_hand: InHand = [(at, stages.under_way, stages.so_far()) for at, stages in scored]
                    self._answer(number, in_hand)
                case "score":
                    self._score(number, *what)
                case "cancel":
                    if number in self._in_hand:
                        self._in_hand[number][0].cancel()
                case _:
                    calling = asyncio.ensure_future(self._call(kind, number, what))
                    others.add(calling)
                    calling.add_done_callback(others.discard)
        try:
            await self._calls.aclose(self._reward.aclose)
        except Exception as error:
            logger.error(f"the reward process could not close its reward: it raised {type(error).__name__}")

    def _score(self, number: int, sample: Sample, track: str, left_s: float) -> None:
        """Begin to score, at once: the next message may cancel it."""
        stages = StageTimes(track)
        with deadline(min(self._reward.deadline_s, left_s)):
            task = asyncio.ensure_future(self._calls.call(self._reward.score, sample, stages))

        def answer(task: asyncio.Task[Reward]) -> None:
            del self._in_hand[number]
            self._answer(number, Said(self._reward.faults.conclude(task), stages.spans, stages.completion_record))

        self._in_hand[number] = (task, stages)
        task.add_done_callback(answer)

    async def _call(self, kind: str, number: int | None, what: Sequence[object]) -> None:
        """`prepare`, `drain` or `warm_up`. A message without a number has no answer."""
        try:
            answer: object = await self._calls.call(getattr(self._reward, kind), *what)
        except Exception as error:
            answer = self._fault(error)
        if number is not None:
            self._answer(number, answer)

    def _answer(self, number: int, answer: object) -> None:
        try:
            content = pickle.dumps((number, answer))
        except Exception as error:
            content = pickle.dumps((number, self._fault(error)))
        self._channel.send_bytes(content)

    @staticmethod
    def _fault(error: Exception) -> ServiceError:
        """What is sent and logged of an error: its type. Its message may hold a customer's text."""
        name = type(error).__name__
        logger.error(f"the reward process could not answer: it raised {name}")
        code = error.code if isinstance(error, ServiceError) else f"raised_{name}"
        return ServiceError(f"the reward process raised {name}", code)


def _end(reason: str) -> None:
    """End this process: code that does not give its event loop back ends with it. The parent starts another one."""
    logger.error(f"the reward process ends ({reason})")
    os._exit(EXIT_BLOCKED)


async def serve(descriptor: int) -> None:
    """Take the parent's module path, where a user's own code may lie, then the reward, and answer for it."""
    channel = Channel(*await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptor)))
    messages = channel.messages()
    async for paths in messages:
        sys.path += [path for path in paths if path not in sys.path]
        break
    async for reward in messages:
        await Worker(reward, channel).run(messages)
    channel.close()


if __name__ == "__main__":
    for terminating in (signal.SIGINT, signal.SIGTERM):
        signal.signal(terminating, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("salesrl_trl").setLevel(int(sys.argv[2]))
    hide_lines()
    asyncio.run(serve(int(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # no thread of a user's code holds it up
