"""Converts an agent's requests to token sequences: requests that continue each other share one sequence. A turn keeps
the tokens the engine sampled; they are appended and never re-encoded.
"""

import contextlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast

from jinja2 import TemplateError
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    parse_response,
    supports_tool_calling,
)

from salesrl_trl.generation.sampler import guard_parser, is_deep
from salesrl_trl.generation.turns import Turn
from salesrl_trl.ground.fencing import make_nonce, neutralise
from salesrl_trl.ground.texts import encodable, mapped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
Message = dict[str, Any]
Tools = list[Message] | None
Ask = Callable[[list[int]], Turn]
"""Requests the next turn of a conversation, given all its token ids so far, and waits for it."""

logger = logging.getLogger(__name__)
_tell = cache(logger.warning)  # logs each line once

_TAG = re.compile(r"<[^\s<>]{1,64}>|\[/?[A-Z_]{2,64}\]")  # template marks, which need not be tokens
_NAMED = re.compile(r"(?i)</?(?!\w*turn)[a-z_]+>")  # tags that prompts mention, e.g. `<think>`


class ForeignText:
    """Neutralises a model's turn marks in tool results and agents' messages, as `fencing` does for a judge: text from
    outside must not open or end a turn."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template: str | None) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        tags = _TAG.findall(str(template or getattr(tokenizer, "chat_template", "")))
        marks = dict.fromkeys(tags, False) | {each.content: each.special for each in added if len(each.content) > 1}
        self._spaced, nonce = dict[str, str](), make_nonce()
        for mark, is_special in marks.items():
            if (text := neutralise(mark, nonce)) != mark or is_special:  # unknown to the fence
                self._spaced[mark] = text if text != mark else f"{mark[0]} {mark[1:]}"
        turns = [mark for mark in self._spaced if marks[mark] or not _NAMED.fullmatch(mark)]
        self._all, self._turns = (
            re.compile("|".join(map(re.escape, sorted(some, key=len, reverse=True))) or r"(?!)")
            for some in (self._spaced, turns)
        )

    def message(self, message: Message) -> Message:
        """The message without turn marks; a tool's message without any mark."""
        if is_deep(message):
            message = {**message, "content": "{'error': 'The result is nested too deeply.'}"}
        text = encodable(message, f"a message of the role {message['role']}")
        made = self.without(text, self._all if message["role"] == "tool" else self._turns)
        if made != text:
            _tell("turn marks of the model in tool results or agents' messages are spaced out")
        return made

    def plain(self, value: T, source: str) -> T:
        """A text or message parts of a `source` without any mark."""
        return self.without(encodable(value, source), self._all)

    def without(self, value: T, marks: re.Pattern[str] | None = None) -> T:
        """A JSON value whose texts are free of these marks, by default those that open or end a turn."""
        return cast(T, mapped(value, partial((marks or self._turns).sub, lambda mark: self._spaced[mark[0]])))


class Refused(Exception):
    def __init__(self, words: str, *, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(words)
        self.code, self.status = code, status


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatForm:
    tokenizer: "PreTrainedTokenizerBase"
    foreign: ForeignText
    template: str | None  # `None`: the tokenizer's own
    kwargs: Mapping[str, object]  # of the template
    ends: frozenset[int]  # token ids that end a turn
    most_tokens: int  # per sequence
    most_completion: int  # per sequence, after its first prompt
    lock: threading.RLock = field(default_factory=threading.RLock)  # guards the tokenizer, which threads share

    @classmethod
    def of(
        cls, tokenizer: "PreTrainedTokenizerBase", foreign: ForeignText, template: str | None, **named: Any
    ) -> "ChatForm":  # fmt: skip
        """The form of a tokenizer, completed by TRL: its response schema for tool calls, and its training template
        where the tokenizer's own template renders a turn differently depending on what follows."""
        probes: list[Message] = [{"role": "user", "content": "dummy"}]
        if supports_tool_calling(tokenizer):
            probes.append({"role": "tool", "name": "dummy", "content": "dummy"})
            if not _reads_calls(tokenizer):
                with contextlib.suppress(ValueError):  # a template unknown to TRL
                    add_response_schema(tokenizer)
        guard_parser(tokenizer)
        form = cls(tokenizer=tokenizer, foreign=foreign, template=template, **named)
        with contextlib.suppress(ValueError):
            if template is None and not all(form.follows(probe) for probe in probes):
                return replace(form, template=get_training_chat_template(tokenizer))
        return form

    def follows(self, message: Message) -> bool:
        """Whether a turn renders the same when this message follows it."""
        with contextlib.suppress(Refused):
            return self.between([message]) is not None
        return False

    def encode(self, messages: Sequence[Message], tools: Tools = None, *, starts_turn: bool = True) -> list[int]:
        try:
            with self.lock:
                ids = self.tokenizer.apply_chat_template(
                    [*map(self.foreign.message, messages)], tools=self.foreign.without(tools) or None,
                    chat_template=self.template, add_generation_prompt=starts_turn, tokenize=True, return_dict=False,
                    **self.kwargs,
                )  # fmt: skip
        except (TemplateError, TypeError) as error:
            raise Refused(f"`messages`: the policy's chat template failed: {error}") from None
        return cast(list[int], ids)

    def between(self, messages: Sequence[Message]) -> list[int] | None:
        """The tokens of messages that follow a turn, with the start of the next turn, rendered in a dummy conversation
        as TRL does for tool results. `None` if the template renders a turn differently when these follow it."""
        before: list[Message] = [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": "dummy"}]
        if messages[0]["role"] == "tool":
            function = {"name": messages[0]["name"], "arguments": {}}
            before[1] |= {"content": "", "tool_calls": [{"type": "function", "function": function}]}
        prefix, full = self.encode(before, starts_turn=False), self.encode([*before, *messages])
        if ends := [place for place, token in enumerate(prefix) if token == self.tokenizer.eos_token_id]:
            prefix = prefix[: ends[-1] + 1]  # whatever the template adds after it belongs in between
        return full[len(prefix) :] if full[: len(prefix)] == prefix else None

    def turn(self, started: "Sequenced", ask: Ask, most: int) -> "Sequenced":
        """The sequence with the policy's next turn, cut to `most` tokens. Raises the engine's errors."""
        prefix = [*started.prompt_ids, *started.ids]
        turn = ask(prefix).cut(most)
        return started.extended([self._read(turn.ids, prefix, started.tools)], turn)

    def _read(self, ids: list[int], prefix: list[int], tools: Sequence[Any] | None) -> Message:
        """The message of a turn, with its tool calls. Without `tools`, apparent calls stay text."""
        with self.lock:
            if _reads_calls(self.tokenizer):
                message: Message = parse_response(self.tokenizer, ids, prefix=prefix, tools=tools)
                if tools or not message.get("tool_calls"):
                    return message
            return {"role": "assistant", "content": self.tokenizer.decode(ids, skip_special_tokens=True)}


def _reads_calls(tokenizer: object) -> bool:
    return any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema"))


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Sequenced:
    """One sequence of an episode, up to the start or the end of a turn."""

    messages: list[Message]  # in the template's format
    tools: Sequence[Any] | None = None
    before: "Sequenced | None" = None  # the sequence it continues
    prompt_messages: int = 0  # number of messages in the first prompt
    prompt_ids: list[int]  # of the first prompt
    ids: list[int]  # of everything after it
    mask: list[int]  # 1 for the policy's tokens, 0 for the rest
    logprobs: list[float] | None  # 0.0 for other tokens; `None` if the engine returns none
    versions: list[int] | None = field(default_factory=list)  # 0 for other tokens; `None` if the engine reports none
    own: int = 0  # number of tokens in the last part

    @property
    def sampled(self) -> int:
        return sum(self.mask)

    def extended(self, messages: Sequence[Message], turn: Turn, *, mask: int = 1) -> "Sequenced":
        size = len(turn.ids)
        return replace(
            self, messages=[*self.messages, *messages], ids=[*self.ids, *turn.ids], mask=[*self.mask, *[mask] * size],
            logprobs=_joined(self.logprobs, turn.logprobs), versions=_joined(self.versions, turn.versions), own=size,
        )  # fmt: skip

    def by_others(self, messages: Sequence[Message], ids: list[int]) -> "Sequenced":
        """Extended by messages of others than the policy, with these tokens."""
        return self.extended(messages, Turn(ids, [0.0] * len(ids), [0] * len(ids)), mask=0)

    def without(self, trained: set[int]) -> "Sequenced":
        """Mask the turns which are in `trained`, by `id`, and add its own."""
        known: Sequenced | None = self
        while known is not None and id(known) not in trained:
            trained.add(id(known))
            known = known.before
        size = len(known.ids) if known else 0
        return replace(self, mask=[*[0] * size, *self.mask[size:]])

    def followed_by(self, other: "Sequenced") -> "Sequenced":
        """Both in one row, which `rollout.several_sequences` takes apart."""
        gap = [0] * len(other.prompt_ids)
        return replace(
            self, ids=[*self.ids, *other.prompt_ids, *other.ids], mask=[*self.mask, *gap, *other.mask],
            logprobs=_joined(self.logprobs, gap, other.logprobs), versions=_joined(self.versions, gap, other.versions),
        )  # fmt: skip


def _joined(*parts: Sequence[Any] | None) -> list[Any] | None:
    """All of them, or `None` if one is `None`."""
    known = [part for part in parts if part is not None]
    return [each for part in known for each in part] if len(known) == len(parts) else None


class AgentCalls:
    """The requests of one episode; `ask` requests a turn from the engine and waits. Thread-safe.

    A request continues an earlier one if it repeats that request's messages and answer, appends messages of other
    roles than the assistant's, and uses the same tools. Any other request starts a new sequence.
    """

    def __init__(self, form: ChatForm, ask: Ask) -> None:
        self.form, self._ask = form, ask
        self.answered: list[Sequenced] = []
        self.error: BaseException | None = None
        """An engine failure that left a request unanswered; the episode itself has not failed."""
        self.is_full = False  # the last request exceeded the token limit
        self._waiting, self._last = 0, time.monotonic()
        self._lock = threading.Lock()

    @property
    def idle_s(self) -> float:
        """Seconds since the policy's last answer; 0 while a request is pending."""
        return 0.0 if self._waiting else time.monotonic() - self._last

    def start(self, messages: Sequence[Message], tools: Tools) -> Sequenced:
        """The sequence up to the start of the turn that answers these messages. Raises `Refused`."""
        if tools and not _reads_calls(self.form.tokenizer):
            raise Refused("`tools`: TRL cannot parse tool calls in this policy's chat template.")
        try:
            plain = _plain(messages)
        except (KeyError, TypeError, AttributeError):
            raise Refused("`messages`: expected those of OpenAI's chat completions.") from None
        keys = [_key(message) for message in plain]
        started = None
        for earlier in sorted(self.answered, key=lambda each: len(each.messages))[::-1]:
            size = len(earlier.messages)
            new = plain[size:]
            is_next = new and all(each["role"] != "assistant" for each in new) and earlier.tools == tools
            if is_next and [_key(message) for message in earlier.messages] == keys[:size]:
                started = self._continued(earlier, new)
                break
        if started is None:
            started = Sequenced(
                messages=plain, tools=tools, prompt_messages=len(plain), prompt_ids=self.form.encode(plain, tools),
                ids=[], mask=[], logprobs=[],
            )  # fmt: skip
        self.is_full = self._room(started) <= 0
        if self.is_full:
            most = f"{self.form.most_completion} tokens after the first prompt (`max_completion_length`)"
            words = f"The sequence is full: it may have {most}, and {self.form.most_tokens} in total."
            raise Refused(words, code="context_length_exceeded")
        return started

    def _continued(self, earlier: Sequenced, new: list[Message]) -> Sequenced | None:
        between = self.form.between(new)
        if between is None:
            return None
        if earlier.ids[-1] not in self.form.ends:  # it was truncated
            between = [self.form.tokenizer.eos_token_id, *between]
        return replace(earlier.by_others(new, between), before=earlier)

    def _room(self, started: Sequenced) -> int:
        size = len(started.ids)
        return min(self.form.most_completion - size, self.form.most_tokens - len(started.prompt_ids) - size)

    def turn(self, started: Sequenced, most: int | None) -> Sequenced:
        """Append the next turn, of at most `most` tokens. Raises the engine's errors."""
        room = self._room(started) if most is None else min(self._room(started), most)
        made = self.form.turn(started, self._asked, room)
        if not made.own:
            raise Refused("The policy's turn is empty.", code="empty_turn")
        return made

    def _asked(self, ids: list[int]) -> Turn:
        with self._lock:
            self._waiting += 1
        try:
            return self._ask(ids)
        except BaseException as error:
            self.error = error
            raise
        finally:
            with self._lock:
                self._waiting, self._last = self._waiting - 1, time.monotonic()

    def ends(self) -> list[Sequenced]:
        """The sequences that no later one continues, longest first by the policy's tokens, the latest first among
        equals; the first one's messages are the completion. All train, each turn in the first sequence that has it."""
        continued = {id(each.before) for each in self.answered}
        ends = sorted((each for each in self.answered if id(each) not in continued), key=attrgetter("sampled"))
        trained = set[int]()
        return [end.without(trained) for end in ends[::-1]]


def _plain(messages: Sequence[Message]) -> list[Message]:
    """Convert a request's messages to the template's format. Raises `Refused` for unsupported content."""
    plain, names = [], dict[str, str]()
    for place, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if isinstance(content, list):
            if any(part.get("type") not in ("text", "input_text") for part in content):
                raise Refused(f"`messages[{place}]`: the policy only reads parts of type `text`.")
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str | None):
            raise Refused(f"`messages[{place}]`: `content` must be a text or a list of parts.")
        made: Message = {"role": "system" if role == "developer" else role, "content": content or ""}
        if role == "assistant" and (calls := message.get("tool_calls")):
            names |= {call.get("id"): call["function"]["name"] for call in calls}
            functions = [{"name": call["function"]["name"], "arguments": _arguments(call)} for call in calls]
            made["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        elif role == "tool":
            made["name"] = names.get(str(message.get("tool_call_id")), message.get("name"))
            if not made["name"]:
                raise Refused(f"`messages[{place}]`: `tool_call_id` matches no earlier call.")
        elif made["role"] not in ("system", "user", "assistant"):
            raise Refused(f"`messages[{place}]`: unknown `role`. Expected system, user, assistant or tool.")
        plain.append(made)
    return plain


def _arguments(call: Message) -> object:
    given = call["function"].get("arguments") or "{}"
    try:
        read = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return given
    return given if is_deep(read) else encodable(read, "an argument repeated by an agent")


def _key(message: Message) -> tuple[object, ...]:
    """A message's content regardless of the framework: without ids, reasoning and surrounding whitespace."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    said = [(call["name"], json.dumps(call.get("arguments") or {}, sort_keys=True)) for call in calls]
    return message["role"], str(message["content"]).strip(), message.get("name"), tuple(said)
