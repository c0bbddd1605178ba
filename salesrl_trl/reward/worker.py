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
from salesrl_trl.reward.remote import Channel, InHand, Scored
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
        self._watched = WatchedLoop(reward.deadline_s, _end)
        self._channel = channel
        self._in_hand: dict[int, tuple[asyncio.Task[Reward], StageTimes]] = {}

    async def run(self, messages: AsyncIterator[Any]) -> None:
        """Answer until the parent is gone."""
        others: set[asyncio.Task[None]] = set()
        async for kind, number, *what in messages:
            if kind == "cancel":
                if (in_hand := self._in_hand.get(what[0])) is not None:
                    in_hand[0].cancel()
                continue
            if kind == "score":  # at once: a message behind it may cancel it
                self._start(number, *what)
            answering = asyncio.ensure_future(self._answer(kind, number, what))
            others.add(answering)
            answering.add_done_callback(others.discard)
        await asyncio.to_thread(self._watched.close, self._reward.aclose)

    async def _answer(self, kind: str, number: int | None, what: Sequence[object]) -> None:
        """Answer one question. Of an error only the type is sent and logged: its message may hold a customer's
        text. A message without a number has no answer."""
        try:
            content = pickle.dumps((number, await self._result(kind, number, what)))
        except Exception as error:
            if number is None:
                return
            name = type(error).__name__
            code = error.code if isinstance(error, ServiceError) else f"raised_{name}"
            logger.error(f"the reward process could not answer {kind!r}: it raised {name}")
            content = pickle.dumps((number, ServiceError(f"the reward process raised {name} over {kind!r}", code)))
        if number is not None:
            self._channel.send_bytes(content)

    async def _result(self, kind: str, number: int | None, what: Sequence[object]) -> object:
        match kind:
            case "ping":  # it is alive, and at this
                in_hand: list[InHand] = [
                    (score, stages.under_way, stages.so_far()) for score, (_, stages) in self._in_hand.items()
                ]
                return in_hand
            case "score":
                assert number is not None
                task, stages = self._in_hand[number]
                await asyncio.wait([task])
                del self._in_hand[number]
                scored: Scored = (self._reward.faults.conclude(task), stages.spans, stages.completion_record)
                return scored
            case "close":
                return await asyncio.to_thread(self._watched.close, self._reward.aclose)
        return await self._watched.call(getattr(self._reward, kind), *what)  # "prepare", "drain", "warm_up"

    def _start(self, number: int, sample: Sample, track: str, left_s: float) -> None:
        stages = StageTimes(track)
        with deadline(min(self._reward.deadline_s, left_s)):
            task = asyncio.ensure_future(self._watched.call(self._reward.score, sample, stages))
        self._in_hand[number] = (task, stages)


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
