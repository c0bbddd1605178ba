"""Conversations of a batch, each in a thread of its own, whose turns an engine loop answers: parse, call tools,
append, and ask again, as TRL's `_tool_call_loop` goes through a batch (a test compares them token by token).
"""

import asyncio
from asyncio import run_coroutine_threadsafe
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from trl.chat_template_utils import parse_response

from salesrl_trl.agents.chat_turns import ChatForm, ForeignText, Message
from salesrl_trl.agents.tools import ConversationNotes, Tool, ToolCalls, drain_traffic
from salesrl_trl.generation.engine_loop import NO_TURN, GivenUp, Prompt, Task, TaskBatch, Turn, TurnLoop
from salesrl_trl.generation.sampler import Encoded, Finished, Handle, Made, Sampled
from salesrl_trl.names import tool_figure, traffic_of
from salesrl_trl.telemetry.completion_record import CompletionRecord

if TYPE_CHECKING:
    from salesrl_trl.wiring.trl_generation import TRLEngine  # imports vLLM, which takes seconds

T = TypeVar("T")

Ask = Callable[[list[int]], Turn]
"""Asks for the next turn of a conversation, from all its token ids so far. Waits for the turn."""


class Conversations(TaskBatch, Generic[T]):
    """The conversations of one batch. A thread begins when its first turn is there.

    `talk` goes through one conversation, in its thread: from its place, its first turn, and the function that asks for
    more. `end_calls` ends the calls of tools that are out, when the conversations are cancelled.
    """

    by_new_weights = True  # so that no turn is older than the rest of the batch

    def __init__(
        self, size: int, loop: TurnLoop, talk: Callable[[int, Turn, Ask], T], end_calls: Callable[[], object]
    ) -> None:
        super().__init__(size, loop)
        self._talk, self._end_calls = talk, end_calls
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
        self.loop.cancel(self, place)  # an agent has left requests open
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
        self._end_calls()


class Episodes(Conversations[T]):
    """Conversations that ask for their first turn too: the engine generates nothing before they begin."""

    def begin(self, prompts: Sequence[Prompt], params: Sequence[object], first: int = 0) -> None:
        self._params = params
        for place in range(len(self)):
            self._start(place, NO_TURN)


@dataclass(kw_only=True, slots=True)
class Talked:
    first: Turn
    notes: ConversationNotes
    ids: list[int]  # behind the prompt, those of tools' results too
    mask: list[int]  # 1 for tokens of the policy, 0 for those of results
    logprobs: list[float] | None  # 0.0 for results
    completion: list[Message] = field(default_factory=list)
    calls: int = 0
    failures: int = 0  # of calls, as TRL counts them

    def add(self, between: Sequence[int], turn: Turn) -> None:
        self.ids += [*between, *turn.ids]
        self.mask += [0] * len(between) + [1] * len(turn.ids)
        if self.logprobs is not None and turn.logprobs is not None:
            self.logprobs += [0.0] * len(between) + turn.logprobs


class ToolTurns:
    def __init__(self, access: "TRLEngine", foreign: ForeignText) -> None:
        self._access = access
        tokenizer, template = access.thread_tokenizer, access.chat_template  # TRL has chosen it for tools
        self._form = ChatForm(tokenizer=tokenizer, foreign=foreign, template=template, **access.form).shared()

    def start(self, prompts: Sequence[object], finished: Finished, ahead: bool, calls: ToolCalls) -> Handle:
        access = self._access
        encoded = access.encode(prompts)

        def talk(place: int, first: Turn, ask: Ask) -> Talked:
            talked = self.talk(place, encoded.ids[place], first, ask, calls)
            if not batch.is_cancelled:
                finished(place, talked.ids, talked.completion, talked.notes.failed)
            return talked

        batch = Conversations(len(prompts), access.loop, talk, lambda: calls.cut_off("given_up"))
        return access.begin(batch, encoded, lambda: self._sampled(prompts, encoded, calls, batch.results()), ahead)

    def talk(self, place: int, prompt_ids: list[int], first: Turn, ask: Ask, calls: ToolCalls) -> Talked:
        """One conversation, in its thread. A failed call that leaves it out ends it."""
        access, form = self._access, self._form
        record = CompletionRecord() if access.keeps_records else None
        notes = ConversationNotes(record=record, turns=1)
        schemas, functions = access.tools_of(place)
        tools = {tool.__name__: tool for tool in functions}
        talked = Talked(first=first, notes=notes, ids=[], mask=[], logprobs=None if first.logprobs is None else [])
        talked.add([], first)
        message = parse_response(form.tokenizer, first.ids, prefix=prompt_ids, tools=schemas)
        talked.completion.append(message)
        for _ in range(access.most_turns):
            if not (asked := message.get("tool_calls")):
                break
            messages, failures = self._results(asked, tools, calls, notes)
            talked.calls, talked.failures = talked.calls + len(asked), talked.failures + failures
            between = form.between(messages)
            if between is None:
                raise ValueError("the chat template writes a turn otherwise when results of tools follow it")
            size = len(talked.ids) + len(between)
            if size > form.most_completion or len(prompt_ids) + size >= form.most_tokens:
                break
            talked.completion += messages
            prefix = [*prompt_ids, *talked.ids, *between]
            turn = Turn([], None if first.logprobs is None else [])
            if notes.failed is None:
                turn = ask(prefix)
                notes.turns += 1
            own = turn.ids[: form.most_completion - size]
            talked.add(between, Turn(own, None if turn.logprobs is None else turn.logprobs[: len(own)]))
            if not own:
                break
            message = parse_response(form.tokenizer, own, prefix=prefix, tools=schemas)
            talked.completion.append(message)
        return talked

    def _results(
        self, asked: Sequence[Mapping[str, Any]], tools: Mapping[str, Tool], calls: ToolCalls, notes: ConversationNotes
    ) -> tuple[list[Message], int]:
        """The messages of calls that are made at once, and how many have failed, as TRL counts them. Those that can't
        be begun come first, as with TRL."""
        early: list[tuple[str, object]] = []
        begun: list[tuple[str, Any]] = []
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
        """TRL's `_generate` around conversations that have ended, and the figures of their tools over all ranks."""
        access = self._access
        logprobs = [each.logprobs for each in talked if each.logprobs is not None]
        loop = (
            [each.mask for each in talked], [each.completion for each in talked], [each.ids for each in talked],
            logprobs or None, sum(each.calls for each in talked), sum(each.failures for each in talked),
            [list[Any]() for _ in talked],
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
