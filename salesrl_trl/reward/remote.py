"""A reward in a process of its own, because its code and vLLM's engine would wait for each other in one.

The trainer's process keeps the batch, its deadlines and its report. The very same reward does everything else in a
child (`worker`). Owns the child's life and the messages to it. `mixed` and `launch.assembly` make such a reward.
"""

import asyncio
import contextlib
import io
import itertools
import logging
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

from salesrl_trl.errors import ConfigError, ServiceError, ServiceUnavailable
from salesrl_trl.ground.process import child_environment
from salesrl_trl.reward.batch import BatchReport, Sample
from salesrl_trl.reward.scorer import TRL_ARGUMENTS, RewardNames, Scorer
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.service.event_loop import remaining_s
from salesrl_trl.telemetry.completion_record import CompletionRecord
from salesrl_trl.timing import Span
from salesrl_trl.types import Example, Outcome, Reward, missing

logger = logging.getLogger(__name__)

_REMEDY = "Its own messages stand above; `reward_process: false` keeps the chain in the trainer's process."
LAST_WORD_S = 0.5  # longest wait for the spans of a call that was cancelled
ANSWER_S = 10.0
"""Longest wait for the child's counts, and for its end. It answers at once unless the machine is overloaded."""

PING_S = 1.0  # time between two looks at whether the child is alive, and at what it scores
MOST_SILENT_PINGS = 30
"""Looks in a row without an answer, after which the child is ended. Seconds would pass while the machine sleeps."""
MOST_SILENT_PINGS_AT_START = 120  # the same before its first answer: it still imports, perhaps on a busy machine
PING = -1  # number of a question without a waiter

InHand: TypeAlias = list[tuple[int, list[str], list[Span]]]
"""The child's answer to a ping: the number of each completion that it scores, its stages under way, its spans."""


class Said(NamedTuple):
    """The child's answer for a completion."""

    reward: Reward
    spans: list[Span]
    record: CompletionRecord | None


class _ChildEnded(ServiceUnavailable, code="reward_process_ended"):
    """The child ended before its answer."""


class Channel:
    """This side's end of the socket: messages between the two processes, pickled."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, *message: object) -> None:
        self.send_bytes(pickle.dumps(message))

    def send_bytes(self, content: bytes) -> None:
        """Send a message that is pickled already. Does not wait."""
        self._writer.write(len(content).to_bytes(8, "big") + content)

    async def messages(self) -> AsyncIterator[Any]:
        """The other side's messages, as they were sent, until it is gone."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size = int.from_bytes(await self._reader.readexactly(8), "big")
                yield pickle.loads(await self._reader.readexactly(size))

    def close(self) -> None:
        self._writer.close()


class _Child:
    """One process, and the questions that wait for its answers. Belongs to one event loop."""

    def __init__(self, process: "subprocess.Popen[bytes]", channel: Channel) -> None:
        self.process = process
        self.channel = channel
        self.scored: dict[int, StageTimes] = {}  # the stages of the completions that it scores, by question
        self.has_ended = False
        self._is_closing = False
        self._is_silent = False  # a wait was in vain, and nothing was heard since
        self._pings, self._most_pings = 0, MOST_SILENT_PINGS_AT_START  # in a row without an answer
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._living = asyncio.ensure_future(self._live())

    @classmethod
    async def start(cls, reward: bytes) -> "_Child":
        """A new process for a pickled `Scorer`. Raises `ServiceUnavailable` where none can be started."""
        ours = theirs = None
        level = logging.getLogger("salesrl_trl").getEffectiveLevel()
        try:
            ours, theirs = socket.socketpair()
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "salesrl_trl.reward.worker", str(theirs.fileno()), str(level)],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=child_environment(),
            )  # fmt: skip
        except OSError as error:
            if ours is not None:
                ours.close()
            logger.error(f"the reward process did not start ({type(error).__name__})")
            text = f"the reward process did not start. {_REMEDY}"
            raise ServiceUnavailable(text, code="reward_process_failed") from None
        finally:
            if theirs is not None:
                theirs.close()
        channel = Channel(*await asyncio.open_unix_connection(sock=ours))
        channel.send_bytes(pickle.dumps([os.path.abspath(path) for path in sys.path]))
        channel.send_bytes(reward)
        return cls(process, channel)

    def ask(self, kind: str, *what: object) -> tuple[int, "asyncio.Future[Any]"]:
        """The number of a question, and its answer to come: `_ChildEnded` where the child ends before."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())  # perhaps nobody waits
        if self.has_ended:
            answer.set_exception(_ChildEnded(f"the reward process has ended. {_REMEDY}"))
        else:
            self._waiting[number] = answer
            self.channel.send(kind, number, *what)
        return number, answer

    async def hear(self, answer: "asyncio.Future[Any]", seconds: float) -> bool:
        """Wait for an answer at most so long, and not at all while the child is silent. Whether it came."""
        await asyncio.wait([answer], timeout=0.0 if self._is_silent else seconds)
        self._is_silent = not answer.done()
        return answer.done() and answer.exception() is None

    async def aclose(self) -> None:
        """Let it close its connections, and end it."""
        self._is_closing = True
        self.channel.close()
        if not await self.hear(self._living, ANSWER_S):
            self.process.kill()
            await self._living

    async def _live(self) -> None:
        """Hand on its answers until it has ended."""
        pinging = asyncio.ensure_future(self._ping())
        try:
            async for number, answer in self.channel.messages():
                self._is_silent, self._pings, self._most_pings = False, 0, MOST_SILENT_PINGS
                if number == PING:
                    self._show(answer)
                elif (waiting := self._waiting.pop(number)).done():
                    continue  # nobody waits for it any more
                elif isinstance(answer, ServiceError):
                    waiting.set_exception(answer)
                else:
                    waiting.set_result(answer)
        except Exception as error:  # what can't be read: without this child there would be no answer ever
            logger.error(f"the reward process sent what can't be read ({type(error).__name__})")
            self.process.kill()
        pinging.cancel()
        self.channel.close()
        code = await asyncio.get_running_loop().run_in_executor(None, self.process.wait)
        self.has_ended = True
        lost = {number: waiting for number, waiting in self._waiting.items() if not waiting.done()}
        if code or (lost and not self._is_closing):
            in_hand = len(lost.keys() & self.scored.keys())  # a question about its counts is not asked again
            again = f"; its {in_hand} completions in hand are asked again of the next, once" if in_hand else ""
            logger.error(f"the reward process ended with code {code}{again}")
        for waiting in lost.values():
            waiting.set_exception(_ChildEnded(f"the reward process ended with code {code}. {_REMEDY}"))

    def _show(self, in_hand: InHand) -> None:
        for number, under_way, spans in in_hand:
            if number in self.scored:
                self.scored[number].show(number, under_way, spans)

    async def _ping(self) -> None:
        """Ask what it is at, and end it once it is silent for too long."""
        while self._pings < self._most_pings:
            self._pings += 1
            self.channel.send("ping", PING)
            await asyncio.sleep(PING_S)
        logger.error(f"the reward process has not answered for {self._pings * PING_S:g} s, and is ended")
        self.process.kill()


class _Pickler(pickle.Pickler):
    """Refuses classes and functions of the program that was started: a child does not find them."""

    def reducer_override(self, value: object) -> Any:
        if getattr(value, "__module__", None) == "__main__" and isinstance(value, type | FunctionType):
            raise pickle.PicklingError(f"{value.__qualname__} is defined in the program that was started")
        return NotImplemented


@dataclass(slots=True)
class _Unit:
    """Completions that are scored together."""

    out: int = 0  # how many of them wait for their reward
    scored: dict[int, Sample] = field(default_factory=dict)  # those that have theirs, by place


class RemoteReward(Scorer):
    """`reward` in a process of its own. Raises `ConfigError` where it can't be sent, or needs the trainer's state.

    A child that dies, or does not answer any more, is replaced. The completions that it was scoring are asked again of
    the next one, once, in the time that they have left. Those of the oldest batch come first, and those of another
    batch when these are settled. So a text that ends each child that reads it costs its own batch alone.
    """

    holds_up = False

    is_apart = True

    def __init__(self, reward: Scorer) -> None:
        super().__init__(reward.deadline_s)
        self.lines, self.budget = reward.lines, reward.budget
        self.__name__ = reward.own_name
        self._local = reward
        self._names = reward.names
        for needs in self._names.needs:
            for argument in needs.of_trl:
                raise ConfigError(
                    f"the reward function {needs.function!r} takes {argument!r}, which is not sent to a process "
                    "of the rewards' own. Expected a function without it. Set `reward_process: false`, or give the "
                    "argument a default."
                )
        try:
            buffer = io.BytesIO()
            _Pickler(buffer).dump(reward)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"this reward chain can't be sent to a process of its own ({type(error).__name__}: {error}). Expected "
                "parts that can be pickled. Set `reward_process: false`."
            ) from None
        self._pickled = buffer.getvalue()
        self._starting: asyncio.Task[_Child] | None = None
        self._units: dict[tuple[int, int], _Unit] = {}  # by batch and number, while one of them is out
        self._again: dict[asyncio.Future[None], int] = {}  # of completions that are asked again: the batch of each

    @property
    def names(self) -> RewardNames:
        return self._names

    @property
    def child(self) -> _Child | None:
        """The child, if one runs."""
        starting = self._starting
        if starting is None or not starting.done() or starting.cancelled() or starting.exception() is not None:
            return None
        return None if starting.result().has_ended else starting.result()

    async def _child(self) -> _Child:
        """The child, which whoever comes first starts. Raises `ServiceUnavailable` where it does not start."""
        starting = self._starting
        is_of_this_loop = starting is not None and starting.get_loop() is asyncio.get_running_loop()
        if starting is None or not is_of_this_loop or (starting.done() and self.child is None):
            starting = self._starting = asyncio.ensure_future(_Child.start(self._pickled))
        return await asyncio.shield(starting)

    async def warm_up(self) -> dict[str, float | ServiceError]:
        """As `Scorer.warm_up`; starts the child."""
        answers: dict[str, float | ServiceError] = await (await self._child()).ask("warm_up")[1]
        return answers

    async def prepare(self, rows: Iterable[Example]) -> None:
        with contextlib.suppress(ServiceUnavailable):  # where no child starts, a completion says so
            (await self._child()).channel.send("prepare", None, [self._sent(row) for row in rows])

    async def drain(self) -> BatchReport:
        if (child := self.child) is not None:
            _, answer = child.ask("drain")
            if await child.hear(answer, ANSWER_S):
                report: BatchReport = answer.result()
                return report
            logger.warning("the reward process does not answer what it has counted")
        return await self._local.drain()  # nothing was asked yet, or the child is gone and its counts with it

    async def aclose(self) -> None:
        if self._starting is not None:
            with contextlib.suppress(ServiceUnavailable):
                await (await self._starting).aclose()
            self._starting = None

    def _sent(self, row: Example) -> Example:
        """What the child needs of a row, without the trainer's state, which grows with every log line."""
        columns = row.keys() if self._names.columns is None else self._names.columns
        return {name: row[name] for name in columns if name in row and name not in TRL_ARGUMENTS}

    async def score(self, sample: Sample, stages: StageTimes) -> Reward:
        sample = replace(sample, row=self._sent(sample.row), origin=None)
        key = (sample.batch, sample.place // self._names.together.size(sample.group, sample.size))
        unit = self._units.setdefault(key, _Unit())
        unit.scored.pop(sample.place, None)
        unit.out += 1
        try:
            try:
                reward = await self._asked_once(sample, stages)
            except _ChildEnded:
                reward = await self._asked_again(sample, stages, unit)
            unit.scored[sample.place] = sample
            return reward
        except ServiceError as error:  # no child starts, or the next one has ended too
            return missing(Outcome.INFRA, error.code)
        finally:
            unit.out -= 1
            if not unit.out:
                del self._units[key]

    async def _asked_once(self, sample: Sample, stages: StageTimes) -> Reward:
        """The child's reward. Raises `ServiceError` where there is no child, or it ends before."""
        child = await self._child()
        number, answer = child.ask("score", sample, stages.track, remaining_s())
        child.scored[number] = stages
        try:
            await asyncio.wait([answer])
        except asyncio.CancelledError:
            child.channel.send("cancel", number)
            await child.hear(answer, LAST_WORD_S)  # for its spans
            raise
        finally:
            del child.scored[number]
            is_answered = answer.done() and answer.exception() is None
            said: Said | None = answer.result() if is_answered else None
            stages.adopt(number, *(() if said is None else (said.spans, said.record)))
            answer.cancel()  # nobody waits for it any more
        return Said(*answer.result()).reward

    async def _asked_again(self, sample: Sample, stages: StageTimes, unit: _Unit) -> Reward:
        """The next child's reward. Those that were scored together with the completion are sent with it."""
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._again[settled] = sample.batch
        try:
            await asyncio.sleep(0)  # until all that were lost with it are listed
            if earlier := [other for other, batch in self._again.items() if batch < sample.batch]:
                await asyncio.wait(earlier)
            mates, unit.scored = unit.scored, {}
            for mate in mates.values():
                (await self._child()).ask("score", mate, stages.track, remaining_s())
            return await self._asked_once(sample, stages)
        finally:
            del self._again[settled]
            settled.set_result(None)
