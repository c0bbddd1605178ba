"""The other side of a conversation: a partner answers each turn of the policy that calls no tool, or ends the
conversation. Owns `Partner`, your own partner's interface, and the replies within one conversation.

A partner is called as a tool is: within a deadline, counted, recorded and replayed. A failed call is not a turn. Its
conversation is excluded, with the failure's code as the reason.
"""

import functools
import inspect
import json
import logging
from asyncio import AbstractEventLoop, run_coroutine_threadsafe
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from salesrl_trl.agents.tools import ConversationNotes, Tool, ToolCalls, tool
from salesrl_trl.errors import BadServiceResponse, ConfigError
from salesrl_trl.names import DIALOGUE_FIGURES
from salesrl_trl.service.transport import Transport
from salesrl_trl.types import AGREEMENT, LENGTH, REFUSAL, SELLER, Example

if TYPE_CHECKING:
    from salesrl_trl.agents.chat_turns import ForeignText  # imports transformers, slowly

Message = dict[str, Any]
_tell = functools.cache(logging.getLogger(__name__).error)  # logs each line once


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A partner's reply: `Reply(text="Fine, I'll take it.", outcome={"end": "agreement", "price": 480.0})`."""

    text: str
    outcome: Mapping[str, str | float] | None = None
    """Set if the reply ends the conversation. `end` is `agreement` or `refusal`. An agreement's `price_share`, the
    share of the highest acceptable price, becomes a metric. Other entries are for reward functions, which find the
    outcome in the conversation's last message."""


class Partner:
    """Base class of partners. Set `SalesGRPOTrainer(partner=...)` to an instance, or `partner` to the path of a class.

    `name` appears in metrics and reason codes. After `max_turns` of the policy's turns, the conversation is over.
    `deadline_s` limits a reply, in seconds, including retries. `transports` are those that `reply` uses.
    """

    name = "partner"
    max_turns = 6
    deadline_s: float | None = 60.0
    transports: Sequence[Transport] = ()

    async def warm_up(self) -> None:
        """With `transports`, called once on each rank before training. Other ranks wait, so limit its time. Raises
        `ServiceError` to end the run."""

    async def reply(self, row: Example, messages: Sequence[Message]) -> Reply:
        """Reply to the last of `messages`, which begin with the prompt and contain calls of tools and their results.
        `row` is the row of the dataset. Called concurrently, on the tools' event loop, which it must not block. Any
        exception excludes the conversation."""
        raise NotImplementedError


def partner_tool(partner: Partner) -> Tool:
    """The partner as a function to be called like a tool, with a reply's JSON as its result."""
    if not isinstance(partner, Partner):
        raise ConfigError(f"`partner` is of type {type(partner).__name__}. Expected an instance of `Partner`.")
    if not inspect.iscoroutinefunction(partner.reply):
        raise ConfigError("`reply` of the partner is not async. Expected `async def reply(self, row, messages)`.")

    async def reply(row: Example, messages: Sequence[Message], place: int) -> str:
        made = await partner.reply(row, messages)
        try:
            if not made.text.strip() or (made.outcome is not None and made.outcome["end"] not in (AGREEMENT, REFUSAL)):
                raise ValueError
            said = {"content": made.text, "outcome": made.outcome and dict(made.outcome)}
            return json.dumps(said, ensure_ascii=False, allow_nan=False)
        except (AttributeError, LookupError, TypeError, ValueError):
            found = f"{partner.name}: `reply` returned a malformed {type(made).__name__}"
            told = f"{found}. Expected a `Reply` with a text; an `outcome` has finite numbers and a known `end`."
            _tell(told)
            raise BadServiceResponse(told, f"{partner.name}_no_reply") from None

    reply.__name__ = partner.name
    function: Tool = tool(deadline_s=partner.deadline_s, service=partner.name, counted=partner.transports)(reply)
    return function


@dataclass(kw_only=True, slots=True)
class Dialogue:
    """A partner's replies within one conversation, requested from the conversation's thread."""

    partner: Partner
    tool: Tool
    row: Example
    place: int  # in the batch, which tells equal conversations of a group apart in a record
    calls: ToolCalls
    notes: ConversationNotes
    foreign: "ForeignText"
    loop: AbstractEventLoop
    turns: int = 0  # of the policy, without those that call tools
    closing: Message | None = field(default=None)
    """The partner's last message, if the policy takes no turn after it. It has no tokens, and the `outcome`."""

    def reply(self, messages: Sequence[Message]) -> list[Message]:
        """The partner's message, or none if the conversation is over. A failed call is noted in `notes`."""
        self.turns += 1
        prompt, row = self.row["prompt"], {name: value for name, value in self.row.items() if name != "prompt"}
        opening = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        given = {"row": row, "messages": [*opening, *messages], "place": self.place}
        asked = self.calls.required(self.tool, self.notes, given, json.loads)
        if (reply := run_coroutine_threadsafe(asked, self.loop).result()) is None:
            return []
        text = self.foreign.plain(reply["content"], "a partner's reply")
        message = {"role": "user", "name": self.partner.name, "content": text}
        if reply["outcome"] is None and self.turns < self.partner.max_turns:
            return [message]
        self.closing = message | ({"outcome": reply["outcome"]} if reply["outcome"] else {})
        return []

    def named(self, messages: Sequence[Message]) -> list[Message]:
        """The whole conversation. The policy's messages have a `name`, so that one without a reply isn't taken for the
        text of a conversation."""
        named = [each | {"name": SELLER} if each["role"] == "assistant" else each for each in messages]
        return named if self.closing is None else [*named, self.closing]


def dialogue_figures(dialogues: Sequence[Dialogue], tool_calls: int) -> dict[str, float]:
    """Sums over conversations, by the names in `DIALOGUE_FIGURES`."""
    sums = dict.fromkeys(("conversations", *DIALOGUE_FIGURES), 0.0)
    sums |= {"conversations": float(len(dialogues)), "tool_calls": float(tool_calls)}
    for each in dialogues:
        outcome: Mapping[str, object] = (each.closing or {}).get("outcome", {})
        end = "failed" if each.notes.failed is not None else str(outcome.get("end", LENGTH))
        sums["turns"] += each.turns
        sums[end] += 1
        share = outcome.get("price_share")
        if end == AGREEMENT and isinstance(share, int | float):
            sums["price_share"] += share
    return sums
