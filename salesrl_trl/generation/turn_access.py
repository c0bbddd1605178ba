"""What agents use of TRL's trainer and of the engine loop. `wiring.trl_access` makes it, `agents` alone reads it."""

from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from salesrl_trl.generation.sampler import Handle, Sampled, TokenSource
from salesrl_trl.generation.tasks import TaskBatch, TurnLoop


class Encoded(NamedTuple):
    """What TRL's `_tokenize_prompts` makes of B prompts."""

    ids: list[list[int]]
    images: list[Any] | None
    fields: Mapping[str, Any]  # what the processor makes beside tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What exists before TRL's `_generate` runs around it, which would make it."""

    encoded: Encoded | None = None
    tokens: TokenSource | None = None  # in place of TRL's engines
    talked: tuple[Any, ...] | None = None  # what `_tool_call_loop` is to return
    rollout: Mapping[str, Any] | None = None  # what a `rollout_func` is to return


class ToolsOf(NamedTuple):
    """The tools of one conversation."""

    schemas: list[Any]  # as the chat template gets them
    functions: Sequence[Callable[..., object]]  # those that are called


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnAccess:
    """Values and bound callables of one trainer."""

    loop: TurnLoop
    encode: Callable[[Sequence[object]], Encoded]
    begin: Callable[[TaskBatch[Any], Encoded, Callable[[], Sampled], bool], Handle]
    """Begins a batch of these prompts. The callable makes its result once it is over; a collective. `True`: training
    goes on before."""
    sample: Callable[[Sequence[object], Made], Sampled]
    """TRL's `_generate` around what is made; a collective."""
    sums: Callable[[Mapping[str, float]], dict[str, float]]
    """Sums over all ranks, which have the same names; a collective."""
    tools: Sequence[Callable[..., object]]  # of TRL, with the methods of environments
    tools_of: Callable[[int], ToolsOf]  # of the conversation at a place
    tools_loop: AbstractEventLoop  # on which tools run
    tokenizer: Any  # a copy for threads
    template: str | None
    form: Mapping[str, Any]  # the other fields of `agents.chat_turns.ChatForm`
    most_turns: int  # after which tools are called
    has_logprobs: bool
    keeps_records: bool
