"""Conversations of a batch, each of which goes through its turns by itself.

Owns the threads of conversations, the turns that an engine is asked for, and what is known of a batch of conversations
while it is under way. The engines answer the turns (`generation.vllm`, `wiring.trl_access`). Standard library only.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from threading import Condition, Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")

Turn = tuple[list[int], list[float] | None]
"""Token ids of what the policy wrote in one turn, and the sampler's log-probs of them, or `None` if it gives none."""
NO_TURN: Turn = ([], None)
Ask = Callable[[int, list[int]], Turn]
"""Asks for the next turn of the conversation at a place, from all its token ids so far. Waits for the turn."""


class GivenUp(BaseException):
    """Raised in a conversation that nobody wants any more. No `except Exception` catches it."""


@dataclass(eq=False, slots=True)
class AskedTurn:
    """A turn for which a conversation waits."""

    batch: object
    place: int
    ids: list[int]
    params: Any = None  # the engine's own sampling parameters of the conversation's batch
    answer: "Future[Turn]" = field(default_factory=Future)


class AskedTurns:
    """The turns that an engine was asked for and has not begun, those of all batches together. From any thread."""

    def __init__(self) -> None:
        self._asked: list[AskedTurn] = []
        self._taken: list[AskedTurn] = []  # by an engine that may be interrupted
        self.changed = Condition()
        """Notified when a turn is asked for, and when a conversation has ended."""

    def ask(self, batch: object, place: int, ids: list[int], params: object = None) -> Turn:
        turn = AskedTurn(batch, place, ids, params)
        with self.changed:
            self._asked.append(turn)
            self.changed.notify_all()
        try:
            return turn.answer.result()
        except CancelledError:
            raise GivenUp from None

    def take(self) -> list[AskedTurn]:
        """Take out all turns, the earliest first."""
        with self.changed:
            taken, self._asked = self._asked, []
            self._taken = [*(turn for turn in self._taken if not turn.answer.done()), *taken]
        return taken

    def drop(self, batch: object, place: int | None = None) -> None:
        """Give up the turns of a batch, or of a conversation of it those that no engine has begun."""
        with self.changed:
            dropped = [turn for turn in self._asked if turn.batch is batch and place in (None, turn.place)]
            self._asked = [turn for turn in self._asked if turn not in dropped]
            dropped += [turn for turn in self._taken if turn.batch is batch and place is None]
        for turn in (turn for turn in dropped if not turn.answer.done()):
            turn.answer.set_exception(GivenUp())

    def __len__(self) -> int:
        return len(self._asked)


class Conversations(Generic[T]):
    """The conversations of one batch, `size` of them. Each has a thread, from the moment at which it begins.

    `talk` goes through one conversation, in its thread: from its place, its first turn (`NO_TURN` of an episode) and
    the function that asks for more. `turns`: where these are asked for, unless `begin` is given another function. With
    `are_episodes` a conversation asks for its first turn too, and the engine generates nothing before it begins.
    `end_calls` ends the calls of tools that are out, when the conversations are given up.
    """

    def __init__(
        self,
        size: int,
        talk: Callable[[int, Turn, Ask], T],
        turns: AskedTurns,
        are_episodes: bool = False,
        end_calls: Callable[[], object] = lambda: None,
    ) -> None:
        self._talk, self.turns, self.are_episodes, self._end_calls = talk, turns, are_episodes, end_calls
        self._has_begun = [False] * size
        self._results: list[T | None] = [None] * size
        self._error: BaseException | None = None
        self.is_given_up = False
        self._under_way = 0

    def __len__(self) -> int:
        return len(self._has_begun)

    def begin(self, place: int, first: Turn, ask: Ask | None = None) -> None:
        """Begin the conversation at `place`, whose first turn is there. Does not wait. From any thread."""
        with self.turns.changed:
            self._has_begun[place] = True
            self._under_way += 1
        arguments = (place, first, ask or partial(self.turns.ask, self))
        Thread(target=self._run, args=arguments, name="conversation", daemon=True).start()

    def _run(self, place: int, first: Turn, ask: Ask) -> None:
        error, result, is_over = None, None, False

        def asked(place: int, ids: list[int]) -> Turn:
            if self.is_given_up or is_over:
                raise GivenUp
            return ask(place, ids)

        try:
            result = self._talk(place, first, asked)
        except GivenUp:
            pass
        except BaseException as raised:  # raised by `results`
            error = raised
        is_over = True
        self.turns.drop(self, place)  # an agent has left requests open
        with self.turns.changed:
            self._results[place], self._error = result, self._error or error
            self._under_way -= 1
            self.turns.changed.notify_all()

    @property
    def is_over(self) -> bool:
        """Whether every conversation has ended, or one of them has failed. From any thread."""
        return self._error is not None or (not self._under_way and all(self._has_begun))

    @property
    def is_waiting(self) -> bool:
        """Whether every conversation that has begun has ended or waits for a turn. With turns of this batch alone."""
        return self._error is not None or len(self.turns) >= self._under_way

    def wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until `ready()`, which is looked at when a turn is asked for or a conversation has ended."""
        with self.turns.changed:
            return self.turns.changed.wait_for(ready, timeout_s)

    def results(self) -> Sequence[T]:
        """What `talk` returned for each conversation; all have ended. Raises the first error."""
        if self._error is not None:
            raise self._error
        results = [result for result in self._results if result is not None]
        assert len(results) == len(self), "a conversation has not ended"
        return results

    def give_up(self) -> None:
        """Nobody will ask for the results: a conversation ends when it wants its next turn, or waits for it."""
        self.is_given_up = True
        self.turns.drop(self)
        self._end_calls()
