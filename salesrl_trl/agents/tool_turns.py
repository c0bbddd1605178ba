"""Runs a batch's conversations, one thread each, over an engine loop: parse, call tools, append and request again, as
TRL's `_tool_call_loop` does for a batch (a test compares them token by token).
"""

import asyncio
from asyncio import run_coroutine_threadsafe
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Generic, TypeVar

from salesrl_trl.agents.chat_turns import Ask, ChatForm, ForeignText, Message, Sequenced
from salesrl_trl.agents.environments import Environments, Seat
from salesrl_trl.agents.episodes import Playing
from salesrl_trl.agents.partner import Dialogue, Partner, dialogue_figures, partner_tool
from salesrl_trl.agents.tools import ConversationNotes, Tool, ToolCalls, drain_traffic
from salesrl_trl.errors import ConfigError
from salesrl_trl.generation.engine_loop import GivenUp, Prompt, Task, TaskBatch, TurnLoop
from salesrl_trl.generation.sampler import Finished, Handle, Made, Sampled
from salesrl_trl.generation.turns import NO_TURN, Turn, refusal
from salesrl_trl.names import DIALOGUE_FIGURES, dialogue_figure, tool_figure, traffic_of
from salesrl_trl.telemetry.completion_record import CompletionRecord
from salesrl_trl.types import Example

if TYPE_CHECKING:
    from salesrl_trl.wiring.trl_generation import TRLEngine  # imports vLLM, which takes seconds

T = TypeVar("T")


class Conversations(TaskBatch, Generic[T]):
    """The conversations of one batch. Each thread starts once its first turn has arrived.

    `talk` runs one conversation in its thread, given its place, its first turn and the function that requests more.
    `report` gets its place and its result. Cancelling the batch cancels its `calls`, and ends its reports.
    """

    by_new_weights = True  # no turn is older than the rest of the batch

    def __init__(
        self, size: int, loop: TurnLoop, talk: Callable[[int, Turn, Ask], T],
        calls: ToolCalls | Playing, report: Callable[[int, T], object] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(size, loop)
        self._talk, self._calls, self._report = talk, calls, report
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
            ended = self._ends[place] = self._talk(place, first, partial(self._ask, place))
            if (report := self._report) is not None:
                report(place, ended)
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
        self._report = None  # it refers to the batch: garbage collections, which free environments, are rare
        self.check()
        return [self._ends[place] for place in range(len(self))]

    def cancel(self) -> None:
        super().cancel()
        self._report = None
        self._calls.cut_off("given_up")


class Episodes(Conversations[T]):
    """Conversations that request their first turn themselves."""

    def begin(self, prompts: Sequence[Prompt], params: Sequence[object], first: int = 0) -> None:
        self._params = params
        for place in range(len(self)):
            self._start(place, NO_TURN)


@dataclass(kw_only=True, slots=True)
class Talked:
    notes: ConversationNotes
    sequence: Sequenced  # its messages follow the prompt
    dialogue: Dialogue | None = None  # with a partner
    rounds: int = 0  # turns whose tool calls were made
    calls: int = 0
    failures: int = 0  # failed calls, as TRL counts them

    @property
    def failed(self) -> str | None:
        """Why it is excluded from training, if it is."""
        return self.notes.failed or refusal(self.sequence.versions)


class ToolTurns:
    def __init__(
        self, access: "TRLEngine", foreign: ForeignText, partner: Partner | None = None,
        environments: Environments | None = None,
    ) -> None:  # fmt: skip
        self._access, self._environments, self._dialogue = access, environments, None
        of_environments = [] if environments is None else environments.functions
        self.functions = [*access.functions, *of_environments]  # counted
        tokenizer, template = access.thread_tokenizer, access.chat_template  # TRL chose it for tools
        self._form = ChatForm(tokenizer=tokenizer, foreign=foreign, template=template, **access.form)
        if partner is not None:  # TRL chose a template for messages of tools alone
            self._form = ChatForm.of(tokenizer, foreign, template, **access.form)
            if not self._form.follows({"role": "user", "content": "dummy"}):
                raise ConfigError(
                    "`partner` needs a chat template that renders a turn the same whatever follows it, and the "
                    "policy's does not. Expected another `chat_template.jinja` in its folder."
                )
            self.functions.append(reply := partner_tool(partner))
            self._dialogue = partial(Dialogue, partner=partner, tool=reply, foreign=foreign, loop=access.tools_loop)

    def start(
        self, prompts: Sequence[object], finished: Finished, ahead: bool, calls: ToolCalls,
        rows: Sequence[Example] | None = None,
    ) -> Handle:  # fmt: skip
        access, environments = self._access, self._environments
        seats: list[Seat] = []
        if environments is not None and rows is not None:
            seats = run_coroutine_threadsafe(environments.seated(rows, calls, not ahead), access.tools_loop).result()
            prompts = [seat.prompt for seat in seats]
            access.use_environments([seat.name for seat in seats])
        encoded = access.encode(prompts)

        def talk(place: int, first: Turn, ask: Ask) -> Talked:
            row, seat = None if rows is None else rows[place], seats[place] if seats else None
            talked = self.talk(place, encoded.ids[place], first, ask, calls, row, seat)
            if seat is not None:
                run_coroutine_threadsafe(seat.score(calls), access.tools_loop).result()
            return talked

        def report(place: int, talked: Talked) -> None:
            columns = {"prompt": seats[place].prompt, "environments": seats[place].environment} if seats else None
            finished(place, talked.sequence.ids, talked.sequence.messages, talked.failed, columns)

        def sampled() -> Sampled:
            talked = batch.results()
            access.use_environments([seat.name for seat in seats])
            return replace(self._sampled(prompts, calls, talked), seats=seats)

        batch = Conversations(len(prompts), access.loop, talk, calls, report)
        return access.begin(batch, encoded, sampled, ahead)

    def talk(
        self, place: int, prompt_ids: list[int], first: Turn, ask: Ask, calls: ToolCalls, row: Example | None = None,
        seat: Seat | None = None,
    ) -> Talked:  # fmt: skip
        """Run one conversation in its thread, with the partner if a `row` is given, or in the environment of its
        `seat`. A failed call that excludes it from training ends it."""
        access, form = self._access, self._form
        notes = ConversationNotes() if seat is None else seat.notes  # its reset may have failed
        notes.turns, notes.record = 1, notes.record or (CompletionRecord() if access.keeps_records else None)
        schemas = access.functions if seat is None else seat.schemas
        tools = {tool.__name__: tool for tool in (access.functions if seat is None else seat.tools)}
        empty = Sequenced(messages=[], tools=schemas, prompt_ids=prompt_ids, ids=[], mask=[], logprobs=[])
        dialogue = None
        if row is not None and self._dialogue is not None:
            dialogue = self._dialogue(row=row, place=place, calls=calls, notes=notes)
        sequence = form.turn(empty, lambda _: first, len(first.ids))
        talked = Talked(notes=notes, sequence=sequence, dialogue=dialogue)
        while talked.notes.failed is None and (messages := self._answered(talked, tools, calls)):
            between = form.between(messages)
            if between is None:
                raise ValueError("the chat template renders a turn differently when tool results follow it")
            size = len(sequence.ids) + len(between)
            if size > form.most_completion or len(prompt_ids) + size >= form.most_tokens:
                break
            talked.sequence = sequence = sequence.by_others(messages, between)
            if notes.failed is not None:
                break
            sequence = form.turn(sequence, ask, form.most_completion - size)
            notes.turns += 1
            if not sequence.own:
                break
            talked.sequence = sequence
        if dialogue is not None:
            talked.sequence = replace(talked.sequence, messages=dialogue.named(talked.sequence.messages))
        return talked

    def _answered(self, talked: Talked, tools: Mapping[str, Tool], calls: ToolCalls) -> list[Message]:
        """What follows a turn: the results of its tool calls, or the partner's reply. Empty at the end."""
        if not (asked := talked.sequence.messages[-1].get("tool_calls")):
            return [] if talked.dialogue is None else talked.dialogue.reply(talked.sequence.messages)
        if talked.rounds >= self._access.most_turns:
            return []
        messages, failures = self._results(asked, tools, calls, talked.notes)
        talked.rounds += 1
        talked.calls, talked.failures = talked.calls + len(asked), talked.failures + failures
        return messages

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

    def close(self, begun: Iterable[ToolCalls]) -> None:
        """Charge the requests of cancelled batches to their budgets."""

        async def settled() -> None:
            await asyncio.gather(*(calls.ended() for calls in begun))
            await drain_traffic(self.functions)

        if self._access.tools_loop.is_running():
            run_coroutine_threadsafe(settled(), self._access.tools_loop).result()

    def _sampled(self, prompts: Sequence[object], calls: ToolCalls, talked: Sequence[Talked]) -> Sampled:
        """Pass finished conversations through TRL's `_generate`. Add the metrics of calls and of the partner over all
        ranks, and the recorded calls; a collective."""
        access, sequences = self._access, [each.sequence for each in talked]
        counted = sum(each.calls for each in talked), sum(each.failures for each in talked)
        sampled = sampled_as_rollout(access, prompts, sequences, [each.messages for each in sequences], {}, counted)
        traffic = run_coroutine_threadsafe(drain_traffic(self.functions), access.tools_loop).result()
        mine = {tool_figure(name, kind): count for name, of in calls.counts.items() for kind, count in of.items()}
        mine |= {traffic_of(name, kind): count for name, of in traffic.items() for kind, count in of.items()}
        if self._dialogue is not None:
            dialogues = [each.dialogue for each in talked if each.dialogue is not None]
            mine |= dialogue_figures(dialogues, sum(each.calls for each in talked))
        figures = access.sums(mine)
        if (conversations := figures.pop("conversations", None)) is not None:
            for name in DIALOGUE_FIGURES:
                figures[dialogue_figure(name)] = figures.pop(name) / max(conversations, 1.0)
        for name in calls.counts:
            figures[tool_figure(name, "seconds")] /= max(figures[tool_figure(name, "calls")], 1.0)
        records = [each.notes.record for each in talked if each.notes.record is not None]
        return replace(
            sampled,
            metrics={**sampled.metrics, **{name: [value] for name, value in figures.items()}},
            calls=[record.calls for record in records],
            versions=[each.versions for each in sequences],
            failures=[each.failed for each in talked],
        )


def sampled_as_rollout(
    access: "TRLEngine", prompts: Sequence[object], sequences: Sequence[Sequenced], messages: Sequence[list[Message]],
    columns: Mapping[str, object], counted: tuple[int, int] = (0, 0),
) -> Sampled:  # fmt: skip
    """Pass sequences through TRL's `_generate` as from a `rollout_func`: TRL masks turns of others only for these, or
    with tools, whose calls and failures are `counted`."""
    masks, ids = [each.mask for each in sequences], [each.ids for each in sequences]
    logprobs = [each.logprobs for each in sequences if each.logprobs is not None] or None
    rollout = {
        "prompt_ids": [each.prompt_ids for each in sequences], "completion_ids": ids, "logprobs": logprobs,
        **({} if access.functions else {"env_mask": masks}), **columns,
    }  # fmt: skip
    talked = (masks, [*messages], ids, logprobs, *counted, [list[object]() for _ in sequences])
    sampled = access.sample(prompts, Made(rollout=rollout, talked=talked))
    return replace(sampled, generated=(*sampled.generated[:3], [*messages], *sampled.generated[4:]))


async def _unknown(name: str) -> None:
    raise ValueError(f"Tool {name} not found.")  # as TRL, in the order of calls
