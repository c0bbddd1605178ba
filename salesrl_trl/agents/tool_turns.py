"""Runs a batch's conversations, one thread each, over an engine loop: parse, call tools, append and request again, as
TRL's `_tool_call_loop` does for a batch (a test compares them token by token).
"""

import asyncio
from asyncio import run_coroutine_threadsafe
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from trl.chat_template_utils import parse_response

from salesrl_trl.agents.chat_turns import Ask, ChatForm, ForeignText, Message, Sequenced
from salesrl_trl.agents.tools import ConversationNotes, Tool, ToolCalls, drain_traffic
from salesrl_trl.generation.engine_loop import NO_TURN, GivenUp, Prompt, Task, TaskBatch, Turn, TurnLoop
from salesrl_trl.generation.sampler import Encoded, Finished, Handle, Made, Sampled
from salesrl_trl.names import tool_figure, traffic_of
from salesrl_trl.telemetry.completion_record import CompletionRecord

if TYPE_CHECKING:
    from salesrl_trl.wiring.trl_generation import TRLEngine  # imports vLLM, which takes seconds

T = TypeVar("T")


class Calls(Protocol):
    def cut_off(self, reason: str) -> None:
        """Cancel running and later calls."""


class Conversations(TaskBatch, Generic[T]):
    """The conversations of one batch. Each thread starts once its first turn has arrived.

    `talk` runs one conversation in its thread, given its place, its first turn and the function that requests more.
    Cancelling the conversations cancels their `calls`.
    """

    by_new_weights = True  # no turn is older than the rest of the batch

    def __init__(self, size: int, loop: TurnLoop, talk: Callable[[int, Turn, Ask], T], calls: Calls) -> None:
        super().__init__(size, loop)
        self._talk, self._calls = talk, calls
        self._ends: dict[int, T] = {}
        self._params: Sequence[object] = ()
        self._ended: set[int] = set()

    def begin(self, prompts: Sequence[Prompt], params: Sequence[object], first: int = 0) -> None:
        self._params = params
        self._submit([Task(self, place, prompt, params[place]) for place, prompt in enumerate(prompts)])

    def _came(self, place: int, answer: "Future[Turn]") -> None:
        if self.is_over:
            return
        if answer.cancelled():
            self._fail(CancelledError())
        elif (error := answer.exception()) is not None:
            self._fail(error)
        else:
            self._start(place, answer.result())

    def _start(self, place: int, first: Turn) -> None:
        with self.loop.changed:
            self.under_way += 1
        Thread(target=self._run, args=(place, first), name="conversation", daemon=True).start()

    def _run(self, place: int, first: Turn) -> None:
        error: BaseException | None = None
        try:
            self._ends[place] = self._talk(place, first, partial(self._ask, place))
        except GivenUp:
            error = CancelledError()
        except BaseException as raised:  # raised by `results`
            error = raised
        self._ended.add(place)
        self.loop.cancel(self, place)  # requests an agent left open
        with self.loop.changed:
            self.under_way -= 1
            if error is None:
                self._end()
            else:
                self._fail(error)

    def _ask(self, place: int, ids: list[int]) -> Turn:
        if self.is_cancelled or place in self._ended:
            raise GivenUp
        return self.loop.ask(Task(self, place, {"prompt_token_ids": ids}, self._params[place]))

    def results(self) -> list[T]:
        """One result for each prompt, once the batch is over."""
        self.check()
        return [self._ends[place] for place in range(len(self))]

    def cancel(self) -> None:
        super().cancel()
        self._calls.cut_off("given_up")


class Episodes(Conversations[T]):
    """Conversations that request their first turn themselves."""

    def begin(self, prompts: Sequence[Prompt], params: Sequence[object], first: int = 0) -> None:
        self._params = params
        for place in range(len(self)):
            self._start(place, NO_TURN)


@dataclass(kw_only=True, slots=True)
class Talked:
    first: Turn
    notes: ConversationNotes
    sequence: Sequenced  # its messages follow the prompt
    calls: int = 0
    failures: int = 0  # failed calls, as TRL counts them


class ToolTurns:
    def __init__(self, access: "TRLEngine", foreign: ForeignText) -> None:
        self._access = access
        tokenizer, template = access.thread_tokenizer, access.chat_template  # TRL chose it for tools
        self._form = ChatForm(tokenizer=tokenizer, foreign=foreign, template=template, **access.form)

    def start(self, prompts: Sequence[object], finished: Finished, ahead: bool, calls: ToolCalls) -> Handle:
        access = self._access
        encoded = access.encode(prompts)

        def talk(place: int, first: Turn, ask: Ask) -> Talked:
            talked = self.talk(place, encoded.ids[place], first, ask, calls)
            if not batch.is_cancelled:
                finished(place, talked.sequence.ids, talked.sequence.messages, talked.notes.failed)
            return talked

        batch = Conversations(len(prompts), access.loop, talk, calls)
        return access.begin(batch, encoded, lambda: self._sampled(prompts, encoded, calls, batch.results()), ahead)

    def talk(self, place: int, prompt_ids: list[int], first: Turn, ask: Ask, calls: ToolCalls) -> Talked:
        """Run one conversation in its thread. A failed call that excludes it from training ends it."""
        access, form = self._access, self._form
        record = CompletionRecord() if access.keeps_records else None
        notes = ConversationNotes(record=record, turns=1)
        schemas, functions = access.tools_of(place)
        tools = {tool.__name__: tool for tool in functions}
        message = self._message(first.ids, prompt_ids, schemas)
        empty = Sequenced(messages=[], prompt_ids=prompt_ids, ids=[], mask=[], logprobs=[])
        sequence = empty.extended([message], first.ids, first.logprobs, mask=1)
        talked = Talked(first=first, notes=notes, sequence=sequence)
        for _ in range(access.most_turns):
            if not (asked := message.get("tool_calls")):
                break
            messages, failures = self._results(asked, tools, calls, notes)
            talked.calls, talked.failures = talked.calls + len(asked), talked.failures + failures
            between = form.between(messages)
            if between is None:
                raise ValueError("the chat template renders a turn differently when tool results follow it")
            size = len(sequence.ids) + len(between)
            if size > form.most_completion or len(prompt_ids) + size >= form.most_tokens:
                break
            talked.sequence = sequence = sequence.extended(messages, between, [0.0] * len(between), mask=0)
            if notes.failed is not None:
                break
            prefix = [*prompt_ids, *sequence.ids]
            turn = ask(prefix)
            notes.turns += 1
            own = turn.ids[: form.most_completion - size]
            if not own:
                break
            message = self._message(own, prefix, schemas)
            talked.sequence = sequence = sequence.extended(
                [message], own, turn.logprobs and turn.logprobs[: len(own)], mask=1
            )
        return talked

    def _message(self, ids: list[int], prefix: list[int], schemas: list[object]) -> Message:
        with self._form.lock:
            message: Message = parse_response(self._form.tokenizer, ids, prefix=prefix, tools=schemas)
        return message

    def _results(
        self, asked: Sequence[Message], tools: Mapping[str, Tool], calls: ToolCalls, notes: ConversationNotes
    ) -> tuple[list[Message], int]:
        """Make the calls concurrently. Returns their messages and the number of failures, as TRL counts them; calls
        that cannot start precede the others, as in TRL."""
        early: list[tuple[str, object]] = []
        begun: list[tuple[str, Coroutine[object, object, object]]] = []
        for call in asked:
            if call["type"] != "function":
                early.append((call.get("name", "unknown"), ValueError(f"Unsupported tool call type: {call['type']}")))
                continue
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if isinstance(arguments, Mapping):
                begun.append((name, calls.call(tools[name], notes, arguments) if name in tools else _unknown(name)))
            else:
                early.append((name, TypeError(f"expected an object of arguments, not {type(arguments).__name__}")))

        async def gathered() -> list[object]:
            return list(await asyncio.gather(*(call for _, call in begun), return_exceptions=True))

        ended = run_coroutine_threadsafe(gathered(), self._access.tools_loop).result() if begun else []
        results = [*early, *((name, result) for (name, _), result in zip(begun, ended, strict=True))]
        messages = []
        for name, result in results:
            told = {"error": str(result)} if isinstance(result, Exception) else result
            content = told if isinstance(told, list) else str(told)
            messages.append(self._form.foreign.message({"role": "tool", "name": name, "content": content}))
        return messages, sum(isinstance(result, Exception) for _, result in results)

    def _sampled(
        self, prompts: Sequence[object], encoded: Encoded, calls: ToolCalls, talked: Sequence[Talked]
    ) -> Sampled:
        """Pass finished conversations through TRL's `_generate` and add tool metrics over all ranks."""
        access = self._access
        sequences = [each.sequence for each in talked]
        logprobs = [each.logprobs for each in sequences if each.logprobs is not None]
        loop = (
            [each.mask for each in sequences], [each.messages for each in sequences], [each.ids for each in sequences],
            logprobs or None, sum(each.calls for each in talked), sum(each.failures for each in talked),
            [list[object]() for _ in talked],
        )  # fmt: skip
        first = [each.first.logprobs for each in talked if each.first.logprobs is not None]
        turns = [each.first.ids for each in talked], first or None
        sampled = access.sample(prompts, Made(encoded=encoded, tokens=lambda *_: turns, talked=loop))
        traffic = run_coroutine_threadsafe(drain_traffic(access.functions), access.tools_loop).result()
        mine = {tool_figure(name, kind): count for name, of in calls.counts.items() for kind, count in of.items()}
        mine |= {traffic_of(name, kind): count for name, of in traffic.items() for kind, count in of.items()}
        figures = access.sums(mine)
        for name in calls.counts:
            figures[tool_figure(name, "seconds")] /= max(figures[tool_figure(name, "calls")], 1.0)
        records = [each.notes.record for each in talked if each.notes.record is not None]
        return replace(
            sampled,
            metrics={**sampled.metrics, **{name: [value] for name, value in figures.items()}},
            calls=[record.calls for record in records],
        )


async def _unknown(name: str) -> None:
    raise ValueError(f"Tool {name} not found.")  # as TRL, in the order of calls
