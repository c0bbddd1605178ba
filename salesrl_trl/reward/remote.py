"""Runs a reward in a separate process, because its code and vLLM's engine would block each other in one. The trainer
process keeps the batch, its deadlines and its report. A child that misses `SILENT_PINGS` pings is killed."""

import asyncio
import contextlib
import faulthandler
import io
import itertools
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

from salesrl_trl.errors import ConfigError, ServiceError, ServiceUnavailable
from salesrl_trl.ground.process import child_environment
from salesrl_trl.reward.batch import BatchReport, Sample
from salesrl_trl.reward.scorer import TRL_ARGUMENTS, Per, Scorer
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.service.event_loop import THREADS, deadline, remaining_s, retrieve
from salesrl_trl.telemetry.logs import hide_lines
from salesrl_trl.types import Example, Outcome, Reward, missing

logger = logging.getLogger(__name__)

_REMEDY = "See its own messages above; `reward_process: false` runs rewards in the trainer's process."
LAST_WORD_S = 0.5  # longest wait for a cancelled call's spans, and for a child's stack trace
ANSWER_S = 5.0  # longest wait for the child's counters, and for its exit
PING_S = 1.0  # interval between pings, which check that the child is alive and which stages it runs
SILENT_PINGS = 120  # unanswered pings in a row before the child is killed: it may be importing or loading a model
PING = -1  # request number of a ping, for which nobody waits
Message = tuple[Any, ...]  # a request's kind, number and arguments, or a response with its number


class _ChildEnded(ServiceUnavailable, code="reward_process_ended"):
    """The child exited before answering, or failed to start."""


class Channel:
    """One end of the socket, which exchanges pickled messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, *message: object) -> None:
        """Does not wait."""
        content = pickle.dumps(message)
        self._writer.write(len(content).to_bytes(8, "big") + content)

    async def messages(self) -> AsyncIterator[Message]:
        """The other side's messages in order, until it disconnects."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size = int.from_bytes(await self._reader.readexactly(8), "big")
                yield pickle.loads(await self._reader.readexactly(size))

    def close(self) -> None:
        self._writer.close()


class _Child:
    """One process and its pending requests."""

    def __init__(self, process: "subprocess.Popen[bytes]", channel: Channel) -> None:
        self.process, self.channel = process, channel
        self.scored: dict[int, StageTimes] = {}  # stages of the completions it is scoring, by request
        self.has_ended = False
        self._is_closing = False
        self._pings = 0  # unanswered in a row
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._living = asyncio.ensure_future(self._live())

    @classmethod
    async def start(cls, reward: bytes) -> "_Child":
        """Start a process for a pickled `Scorer`."""
        level = logging.getLogger("salesrl_trl").getEffectiveLevel()
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "salesrl_trl.reward.remote", str(theirs.fileno()), str(level)],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=child_environment(),
            )  # fmt: skip
        except OSError as error:
            ours.close()
            raise _ChildEnded(f"the reward process did not start ({type(error).__name__}). {_REMEDY}") from None
        finally:
            theirs.close()
        channel = Channel(*await asyncio.open_unix_connection(sock=ours))
        channel.send([os.path.abspath(path) for path in sys.path], reward)
        return cls(process, channel)

    def ask(self, kind: str, *what: object) -> tuple[int, "asyncio.Future[Any]"]:
        """Send a request. Returns its number and a future of the response, which fails with `_ChildEnded` if the child
        exits first."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        answer.add_done_callback(retrieve)  # possibly nobody awaits it
        if self.has_ended:
            answer.set_exception(_ChildEnded(f"the reward process has exited. {_REMEDY}"))
        else:
            self._waiting[number] = answer
            self.channel.send(kind, number, *what)
        return number, answer

    async def aclose(self) -> None:
        self._is_closing = True
        self.channel.close()
        await asyncio.wait([self._living], timeout=ANSWER_S)
        if not self._living.done():
            await self._end("does not close")
            await self._living

    async def _live(self) -> None:
        pinging = asyncio.ensure_future(self._ping())
        try:
            async for number, answer in self.channel.messages():
                self._pings = 0
                if number == PING:
                    for scored, under_way in answer:
                        if scored in self.scored:
                            self.scored[scored].elsewhere = under_way
                elif not (waiting := self._waiting.pop(number)).done():  # otherwise the caller has gone
                    (waiting.set_exception if isinstance(answer, ServiceError) else waiting.set_result)(answer)
        except Exception as error:  # otherwise its callers would wait forever
            logger.error(f"the reward process sent an unreadable message ({type(error).__name__})")
            self.process.kill()
        pinging.cancel()
        self.channel.close()
        code = await asyncio.get_running_loop().run_in_executor(None, self.process.wait)
        self.has_ended = True
        lost = {number: waiting for number, waiting in self._waiting.items() if not waiting.done()}
        if code or (lost and not self._is_closing):
            in_hand = len(lost.keys() & self.scored.keys())
            logger.error(f"the reward process exited with code {code} while scoring {in_hand} completions")
        for waiting in lost.values():
            waiting.set_exception(_ChildEnded(f"the reward process exited with code {code}. {_REMEDY}"))

    async def _ping(self) -> None:
        while self._pings < SILENT_PINGS:
            self._pings += 1
            self.channel.send("ping", PING)
            await asyncio.sleep(PING_S)
        await self._end(f"has not answered for {self._pings * PING_S:g} s")

    async def _end(self, why: str) -> None:
        logger.error(f"the reward process {why} and is being killed; its stack trace follows")
        self.process.send_signal(signal.SIGUSR1)
        await asyncio.sleep(LAST_WORD_S)
        self.process.kill()


class _Pickler(pickle.Pickler):
    """Rejects classes and functions from the main program, which a child can't import."""

    def reducer_override(self, value: object) -> Any:
        if getattr(value, "__module__", None) == "__main__" and isinstance(value, type | FunctionType):
            raise pickle.PicklingError(f"{value.__qualname__} is defined in the main program")
        return NotImplemented


class RemoteReward(Scorer):
    """Runs `reward` in a separate process. Raises `ConfigError` if it can't be pickled.

    A child that crashes or hangs is replaced. Completions it was scoring individually are retried once in the next
    child, within their remaining time. Completions scored jointly stay unscored.
    """

    is_apart = True

    def __init__(self, reward: Scorer) -> None:
        super().__init__(reward.deadline_s)
        self.lines, self.budget = reward.lines, reward.budget
        self.__name__ = reward.own_name
        self._local = reward
        self._names = reward.names
        try:
            buffer = io.BytesIO()
            _Pickler(buffer).dump(reward)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"this reward can't be sent to a separate process ({type(error).__name__}: {error}). Expected "
                "picklable parts. Set `reward_process: false`."
            ) from None
        self._pickled = buffer.getvalue()
        self._starting: asyncio.Task[_Child] | None = None

    @property
    def child(self) -> _Child | None:
        """The running child, if any."""
        starting = self._starting
        if starting is None or not starting.done() or starting.cancelled() or starting.exception() is not None:
            return None
        return None if starting.result().has_ended else starting.result()

    async def _child(self) -> _Child:
        """The child, started by the first caller. Raises `_ChildEnded` if it fails to start."""
        if self._starting is None or (self._starting.done() and self.child is None):
            self._starting = asyncio.ensure_future(_Child.start(self._pickled))
        return await asyncio.shield(self._starting)

    async def warm_up(self) -> dict[str, float | ServiceError]:
        answers: dict[str, float | ServiceError] = await (await self._child()).ask("warm_up")[1]
        return answers

    async def prepare(self, rows: Iterable[Example]) -> None:
        with contextlib.suppress(ServiceUnavailable):  # if no child starts, scoring reports it
            (await self._child()).ask("prepare", [self._sent(row) for row in rows])

    async def drain(self) -> BatchReport:
        if (child := self.child) is not None:
            _, answer = child.ask("drain")
            await asyncio.wait([answer], timeout=ANSWER_S)
            if answer.done() and answer.exception() is None:
                report: BatchReport = answer.result()
                return report
            logger.warning("the reward process does not respond to the request for its counters")
        return await self._local.drain()  # nothing was requested yet, or the counters were lost with the child

    async def aclose(self) -> None:
        if self._starting is not None:
            with contextlib.suppress(ServiceUnavailable):
                await (await self._starting).aclose()
            self._starting = None

    def _sent(self, row: Example) -> Example:
        """The columns that the child needs, without the trainer's state, which grows with every log line."""
        columns = row.keys() if self.names.columns is None else self.names.columns
        return {name: row[name] for name in columns if name in row and name not in TRL_ARGUMENTS}

    async def score(self, sample: Sample, stages: StageTimes) -> Reward:
        sample = replace(sample, row=self._sent(sample.row), origin=None)
        try:
            try:
                return await self._asked(sample, stages)
            except _ChildEnded:
                if self.names.together is not Per.COMPLETION:  # others of its group may be scored already
                    raise
                return await self._asked(sample, stages)
        except ServiceError as error:  # no child starts, or the second one exited too
            return missing(Outcome.INFRA, error.code)

    async def _asked(self, sample: Sample, stages: StageTimes) -> Reward:
        """The child's reward. Raises `ServiceError` if no child starts, or it exits first."""
        child = await self._child()
        number, answer = child.ask("score", sample, stages.track, remaining_s())
        child.scored[number] = stages
        try:
            await asyncio.wait([answer])
        except asyncio.CancelledError:
            child.channel.send("cancel", number)
            await asyncio.wait([answer], timeout=LAST_WORD_S)  # to collect its spans
            raise
        finally:
            del child.scored[number]
            stages.elsewhere = ()
            if answer.done() and answer.exception() is None:
                stages.adopt(*answer.result()[1:])
            answer.cancel()  # if the caller has gone
        reward: Reward = answer.result()[0]
        return reward


class Worker:
    """The child's side: answers requests with a reward."""

    def __init__(self, reward: Scorer, channel: Channel) -> None:
        self._reward, self._channel = reward, channel
        self._in_hand: dict[int, tuple[asyncio.Task[Reward], StageTimes]] = {}

    async def run(self, messages: AsyncIterator[Message]) -> None:
        """Answer until the parent disconnects."""
        others: set[asyncio.Task[None]] = set()
        async for kind, number, *what in messages:
            match kind:
                case "ping":
                    self._answer(number, [(at, stages.under_way) for at, (_, stages) in self._in_hand.items()])
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
            await self._reward.aclose()
        except Exception as error:
            self._fault(error)

    def _score(self, number: int, sample: Sample, track: str, left_s: float) -> None:
        stages = StageTimes(track)
        with deadline(min(self._reward.deadline_s, left_s)):
            task = asyncio.ensure_future(self._reward.score(sample, stages))
        self._in_hand[number] = (task, stages)

        def scored(task: asyncio.Task[Reward]) -> None:
            del self._in_hand[number]
            self._answer(number, (self._reward.faults.conclude(task), stages.spans, stages.completion_record))

        task.add_done_callback(scored)

    async def _call(self, kind: str, number: int, what: Sequence[object]) -> None:
        try:
            self._answer(number, await getattr(self._reward, kind)(*what))
        except Exception as error:
            self._answer(number, self._fault(error))

    def _answer(self, number: int, answer: object) -> None:
        try:
            self._channel.send(number, answer)
        except Exception as error:  # an unpicklable answer
            self._channel.send(number, self._fault(error))

    @staticmethod
    def _fault(error: Exception) -> ServiceError:
        """Log and return an error by its type alone: its message may quote a customer."""
        text = f"the reward process raised {type(error).__name__}"
        logger.error(text)
        return ServiceError(text, error.code if isinstance(error, ServiceError) else f"raised_{type(error).__name__}")


async def serve(descriptor: int) -> None:
    """Adopt the parent's module path, from which custom code may be imported, then receive and serve the reward."""
    asyncio.get_running_loop().set_default_executor(THREADS)  # for `asyncio.to_thread`
    channel = Channel(*await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptor)))
    messages = channel.messages()
    async for paths, reward in messages:
        sys.path += [path for path in paths if path not in sys.path]
        await Worker(pickle.loads(reward), channel).run(messages)
    channel.close()


if __name__ == "__main__":
    for terminating in (signal.SIGINT, signal.SIGTERM):
        signal.signal(terminating, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)  # prints stack traces even while the GIL is held
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("salesrl_trl").setLevel(int(sys.argv[2]))
    hide_lines()
    asyncio.run(serve(int(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # custom code's threads must not delay the exit
