"""The child of `remote`: a reward chain, and one socket on which it is asked.

    python -m salesrl_trl.reward.worker FD

Ends when the other side of the socket is gone, whatever became of it. Signals that a terminal or a scheduler sends to
all processes are the parent's to answer.
"""

import asyncio
import logging
import signal
import socket
import sys
from typing import Any

from salesrl_trl.reward.batch import Extent, Stages
from salesrl_trl.reward.chain import SalesReward
from salesrl_trl.reward.deadline import deadline
from salesrl_trl.reward.remote import Channel
from salesrl_trl.types import Reward


class Worker:
    """Answers one parent.

    Args:
        chain (`SalesReward`):
            The chain.
        channel (`Channel`):
            To the parent.
    """

    def __init__(self, chain: SalesReward, channel: Channel) -> None:
        self._chain = chain
        self._channel = channel
        self._in_hand_by: dict[int, tuple[asyncio.Task[Reward], Stages, Extent]] = {}

    async def run(self, messages: Any) -> None:
        """Answer until the parent is gone."""
        others: set[asyncio.Task[None]] = set()
        async for kind, number, *what in messages:
            if kind == "cancel":
                if (in_hand := self._in_hand_by.get(what[0])) is not None:
                    in_hand[0].cancel()
                continue
            if kind == "score":  # at once: a message behind it may cancel it
                self._start(number, *what)
            answering = asyncio.ensure_future(getattr(self, f"_{kind}")(number, *what))
            others.add(answering)
            answering.add_done_callback(others.discard)
        await self._chain.aclose()

    def _start(self, number: int, index: int, completion: str, track: str) -> None:
        stages, judging = Stages(track), Extent()
        with deadline(self._chain.deadline_s):
            task = asyncio.ensure_future(self._chain._score(index, completion, stages, judging))
        self._in_hand_by[number] = (task, stages, judging)

    async def _score(self, number: int, *_: Any) -> None:
        task, stages, judging = self._in_hand_by[number]
        await asyncio.wait([task])
        del self._in_hand_by[number]
        self._channel.send(number, (self._chain._result(task), stages.spans, judging))

    async def _references(self, number: None, rows: list[int]) -> None:
        self._chain.fetch_references(rows)

    async def _settled(self, number: None) -> None:
        self._chain._settled()

    async def _report(self, number: int) -> None:
        self._channel.send(number, self._chain.take_report())

    async def _in_hand(self, number: int) -> None:
        told = [(each, stages.under_way, stages.so_far()) for each, (_, stages, _) in self._in_hand_by.items()]
        self._channel.send(number, told)

    async def _warm_up(self, number: int) -> None:
        self._channel.send(number, await self._chain.warm_up())

    async def _close(self, number: int) -> None:
        await self._chain.aclose()
        self._channel.send(number, None)


async def serve(descriptor: int) -> None:
    """Take the chain, which is the first message, and answer for it."""
    channel = Channel(*await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptor)))
    messages = channel.messages()
    async for chain in messages:
        await Worker(chain, channel).run(messages)


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    asyncio.run(serve(int(sys.argv[1])))
