"""TRL's environments: each conversation has an instance of its own from its reset until its rewards have arrived, also
with several batches in flight. TRL's scoring, which would reset them again, gets `Prepared` in their place."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from salesrl_trl.agents.chat_turns import ForeignText, Message
from salesrl_trl.agents.tools import ConversationNotes, Tool, ToolCalls
from salesrl_trl.errors import DataError
from salesrl_trl.ground.texts import encodable
from salesrl_trl.types import Example, Reward

if TYPE_CHECKING:
    from salesrl_trl.wiring.trl_generation import TRLEngine  # imports vLLM, which takes seconds


class Prepared:
    """Stands for an environment whose observation is already in the prompt."""

    def reset(self, **row: object) -> None:
        pass


@dataclass(kw_only=True, eq=False, slots=True, weakref_slot=True)
class Seat:
    """A conversation's environment, and its prompt with the observation."""

    name: str | None
    environment: Any
    prompt: list[Message]
    notes: ConversationNotes
    schemas: Sequence[Tool]
    tools: Sequence[Tool]
    reward: float | None = None  # from `get_reward`

    async def reset(self, row: Example, calls: ToolCalls, foreign: ForeignText) -> None:
        given = {name: value for name, value in row.items() if name != "environment" or self.name is None}

        def observed(observation: object) -> list[Message]:
            text = encodable(observation, "an environment's observation")
            return with_observation(self.prompt, foreign.without(text))  # may show tags, but opens no turn

        self.prompt = await calls.required(self.environment.reset, self.notes, given, observed) or self.prompt

    async def score(self, calls: ToolCalls) -> None:
        """Ask the environment for its reward, if it has any."""
        if self.notes.failed is None and hasattr(self.environment, "get_reward"):
            self.reward = await calls.required(self.environment.get_reward, self.notes, {}, _number)


class Environments:
    def __init__(self, access: "TRLEngine", foreign: ForeignText) -> None:
        self._foreign = foreign
        self._seats: WeakValueDictionary[int, Seat] = WeakValueDictionary()  # by the environment's identity
        self._factories, self._free, self._tools = access.take_environments(Prepared, self._rewards_of)
        own = [getattr(probe, name, None) for [probe] in self._free.values() for name in ("reset", "get_reward")]
        self.functions: list[Tool] = [method for method in own if method is not None]

    async def seated(self, rows: Sequence[Example], calls: ToolCalls, in_order: bool) -> list[Seat]:
        """Reset an environment for each row; with `in_order` one after the other, as TRL does."""
        seats = [self._seat(row) for row in rows]
        resets = [seat.reset(row, calls, self._foreign) for seat, row in zip(seats, rows, strict=True)]
        for group in [[reset] for reset in resets] if in_order else [resets]:
            await asyncio.gather(*group)
        return seats

    def _seat(self, row: Example) -> Seat:
        name = None if None in self._factories else row.get("environment")
        if name not in self._factories:
            known = ", ".join(map(str, self._factories))
            raise DataError(f"a row has {name!r}, which is not among the environments. Expected one of: {known}.")
        environment = self._free[name].pop(0) if self._free[name] else self._factories[name]()
        kind, tools = type(environment), list[Tool]()
        for tool in self._tools[name]:  # of the first instance
            is_own = type(getattr(tool, "__self__", None)) is kind
            tools.append(MethodType(tool.__func__, environment) if is_own else tool)
        prompt = row.get("prompt", [{"role": "user", "content": ""}])  # an environment may provide it
        seat = Seat(
            name=name, environment=environment, prompt=prompt, notes=ConversationNotes(), schemas=self._tools[name],
            tools=tools,
        )  # fmt: skip
        self._seats[id(environment)] = seat
        return seat

    def release(self, seats: Sequence[Seat], rewards: Sequence[Reward]) -> None:
        """Reuse the environments of scored conversations. In others a failed call or a late reward may still run."""
        for seat, reward in [*zip(seats, rewards, strict=True)][::-1]:
            if reward.value is not None:
                self._free[seat.name].insert(0, seat.environment)

    def _rewards_of(self, kind: type) -> Callable[..., list[float | None]]:
        """The function that reports to TRL the rewards of one class."""

        def get_reward(environments: Sequence[object], **_: object) -> list[float | None]:
            return [self._seats[id(each)].reward if type(each) is kind else None for each in environments]

        return get_reward


def _number(given: Any) -> float | None:
    return Reward.scored(float(given)).value  # raises `ValueError` if no reward can be that number


def with_observation(prompt: list[Message], observation: Any) -> list[Message]:
    """The prompt with an observation at the end of its last message, as in TRL."""
    content = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]
