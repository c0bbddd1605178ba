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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias, TypeVar, cast

from salesrl_trl.errors import ConfigError, ServiceError, ServiceUnavailable
from salesrl_trl.ground.process import child_environment
from salesrl_trl.reward.batch import BatchReport, Sample
from salesrl_trl.reward.scorer import TRL_ARGUMENTS, RewardNames, Scorer
from salesrl_trl.reward.scoring import missing
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.service.event_loop import PerLoop, remaining_s
from salesrl_trl.telemetry.completion_record import CompletionRecord
from salesrl_trl.timing import Span
from salesrl_trl.types import Example, Outcome, Reward

T = TypeVar("T")

logger = logging.getLogger(__name__)

_REMEDY = "Its own messages stand above; `reward_process: false` keeps the chain in the trainer's process."
LAST_WORD_S = 0.5  # longest wait for the spans of a call that was cancelled
ANSWER_S = 10.0
"""Longest wait for the child's answer about itself. It answers at once unless the machine is overloaded."""

PING_S = 1.0  # time between two looks at whether the child is alive, and at what it scores
MOST_SILENT_PINGS = 30
"""Looks in a row without an answer, after which the child is ended. Seconds would pass while the machine sleeps."""
MOST_SILENT_PINGS_AT_START = 120  # the same before its first answer: it still imports, perhaps on a busy machine
_PING = -1  # number of a question without a waiter

InHand: TypeAlias = tuple[int, list[str], list[Span]]
"""A completion that the child scores: its number, its stages under way, its spans so far."""
Scored: TypeAlias = tuple[Reward, list[Span], CompletionRecord | None]  # the child's answer for a completion


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
    """A child, and the calls that wait for it. Belongs to one event loop. `reward` is a pickled `Scorer`."""

    def __init__(self, reward: bytes) -> None:
        self._reward = reward
        self.scored: dict[int, StageTimes] = {}  # the stages of the completions that it scores, by number
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[object]] = {}
        self._channel: Channel | None = None
        self._starting: asyncio.Task[Channel] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._messages = 0  # from it
        self._silent_at: int | None = None  # messages when a wait was in vain
        self._is_closing = False  # calls that it leaves without an answer were given up

    async def ask(self, kind: str, *what: object) -> object:
        """The answer to a question. Raises `ServiceUnavailable` where the child ends before."""
        _, answer = await self.asked(kind, *what)
        return await answer

    async def asked(self, kind: str, *what: object) -> tuple[int, "asyncio.Future[object]"]:
        """Ask. Returns the question's number and its answer to come."""
        channel = await self._open()
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        channel.send(kind, number, *what)
        return number, answer

    @property
    def is_silent(self) -> bool:
        """Whether nothing was heard since a wait that was in vain."""
        return self._silent_at == self._messages

    async def within(self, seconds: float, answer: Callable[[], Awaitable[T]]) -> T:
        """Wait for an answer at most so long, and not at all for a child that is silent. Raises `TimeoutError`."""
        heard = self._messages
        try:
            return await asyncio.wait_for(answer(), 0.0 if self.is_silent else seconds)
        except TimeoutError:
            self._silent_at = heard
            raise

    async def send(self, kind: str, *what: object) -> None:
        """Send a message that has no answer. Does nothing where the child does not start: a question raises then."""
        with contextlib.suppress(ServiceUnavailable):
            (await self._open()).send(kind, None, *what)

    async def aclose(self) -> None:
        """Let it close its connections, and end it."""
        channel = self._channel
        if channel is None or self._process is None or self._process.poll() is not None:
            return
        self._is_closing = True
        with contextlib.suppress(TimeoutError, ServiceUnavailable):
            await self.within(ANSWER_S, partial(self.ask, "close"))
        channel.close()
        if self._reading is not None:
            _, still = await asyncio.wait([self._reading], timeout=0.0 if self.is_silent else ANSWER_S)
            if still:  # it does not answer
                self._process.kill()
                await self._reading

    async def _open(self) -> Channel:
        if self._channel is None:
            if self._starting is None:  # by whoever comes first
                self._starting = asyncio.ensure_future(self._start())
            await asyncio.shield(self._starting)
        assert self._channel is not None
        return self._channel

    async def _start(self) -> Channel:
        ends: list[socket.socket] = []
        try:
            ends += socket.socketpair()
            ours, theirs = ends
            level = logging.getLogger("salesrl_trl").getEffectiveLevel()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "salesrl_trl.reward.worker", str(theirs.fileno()), str(level)],
                    pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=child_environment(),
                )  # fmt: skip
        except OSError as error:
            for end in ends:
                end.close()
            self._starting = None  # the next call tries again
            logger.error(f"the reward process did not start ({type(error).__name__})")
            text = f"the reward process did not start. {_REMEDY}"
            raise ServiceUnavailable(text, code="reward_process_failed") from None
        self._channel = Channel(*await asyncio.open_unix_connection(sock=ours))
        self._channel.send_bytes(pickle.dumps([os.path.abspath(path) for path in sys.path]))
        self._channel.send_bytes(self._reward)
        self._reading = asyncio.ensure_future(self._read(self._channel, self._process))
        return self._channel

    async def _watch(self, channel: Channel, process: "subprocess.Popen[bytes]") -> None:
        """End the child once it is silent for too long."""
        silent, most_silent = 0, MOST_SILENT_PINGS_AT_START
        while silent < most_silent:
            heard = self._messages
            channel.send("ping", _PING)
            await asyncio.sleep(PING_S)
            if self._messages > heard:
                silent, most_silent = 0, MOST_SILENT_PINGS
            else:
                silent += 1
        logger.error(f"the reward process has not answered for {silent * PING_S:g} s, and is ended")
        process.kill()

    async def _read(self, channel: Channel, process: "subprocess.Popen[bytes]") -> None:
        watching = asyncio.ensure_future(self._watch(channel, process))
        try:
            async for number, answer in channel.messages():
                self._messages += 1
                if number == _PING:
                    for score, under_way, spans in cast(list[InHand], answer):
                        if score in self.scored:
                            self.scored[score].show(score, under_way, spans)
                    continue
                waiting = self._waiting.pop(number, None)
                if waiting is None or waiting.done():
                    continue
                if isinstance(answer, ServiceError):
                    waiting.set_exception(answer)
                    waiting.exception()  # seen, also where nobody waits any more
                else:
                    waiting.set_result(answer)
        except Exception as error:  # what can't be read: without this child there would be no answer ever
            logger.error(f"the reward process sent what can't be read ({type(error).__name__})")
            process.kill()
        watching.cancel()
        channel.close()
        code = await asyncio.get_running_loop().run_in_executor(None, process.wait)
        self._channel = self._starting = None
        lost = {number: waiting for number, waiting in self._waiting.items() if not waiting.done()}
        self._waiting = {}
        if code or (lost and not self._is_closing):
            in_hand = len(lost.keys() & self.scored.keys())  # a question about its counts is not asked again
            again = f"; its {in_hand} completions in hand are asked again of the next, once" if in_hand else ""
            logger.error(f"the reward process ended with code {code}{again}")
        for waiting in lost.values():
            waiting.set_exception(_ChildEnded(f"the reward process ended with code {code}. {_REMEDY}"))
            waiting.exception()  # seen, also where nobody waits any more


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
        self._children: PerLoop[_Child] = PerLoop(lambda: _Child(buffer.getvalue()))
        self._was_asked = False
        self._units: dict[tuple[int, int], _Unit] = {}  # by batch and number, while one of them is out
        self._again: dict[asyncio.Future[None], int] = {}  # of completions that are asked again: the batch of each

    @property
    def names(self) -> RewardNames:
        return self._names

    async def warm_up(self) -> dict[str, float | ServiceError]:
        """As `Scorer.warm_up`; starts the child."""
        return cast(dict[str, float | ServiceError], await self._child().ask("warm_up"))

    async def prepare(self, rows: Iterable[Example]) -> None:
        await self._child().send("prepare", [self._sent(row) for row in rows])

    async def drain(self) -> BatchReport:
        if self._was_asked:
            try:
                child = self._child()
                return cast(BatchReport, await child.within(ANSWER_S, partial(child.ask, "drain")))
            except (TimeoutError, ServiceError) as error:
                logger.warning(f"the reward process does not answer ({type(error).__name__})")
        return await self._local.drain()  # nothing was asked yet, or the child is gone and its counts with it

    async def aclose(self) -> None:
        await self._child().aclose()
        self._children.pop()
        self._was_asked = False

    def _child(self) -> _Child:
        self._was_asked = True
        return self._children.get()

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
        child = self._child()
        number, answer = await child.asked("score", sample, stages.track, remaining_s())
        child.scored[number] = stages
        spans, record = list[Span](), None
        try:
            reward, spans, record = cast(Scored, await asyncio.shield(answer))
            return reward
        except asyncio.CancelledError:
            await child.send("cancel", number)
            with contextlib.suppress(TimeoutError, ServiceError):
                last = cast(Scored, await child.within(LAST_WORD_S, lambda: asyncio.shield(answer)))
                _, spans, record = last
            answer.cancel()  # nobody waits for it any more
            raise
        finally:
            del child.scored[number]
            stages.adopt(number, spans, record)

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
                await self._child().asked("score", mate, stages.track, remaining_s())
            return await self._asked_once(sample, stages)
        finally:
            del self._again[settled]
            settled.set_result(None)
