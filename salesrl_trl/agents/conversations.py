"""Conversations of a batch, each of which goes through its turns by itself, in a thread of its own.

Owns these threads. An engine loop answers their turns (`generation.engine`).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from threading import Thread
from typing import TypeVar

from salesrl_trl.generation.tasks import NO_TURN, GivenUp, Prompt, Task, TaskBatch, Turn, TurnLoop

T = TypeVar("T")

Ask = Callable[[list[int]], Turn]
"""Asks for the next turn of a conversation, from all its token ids so far. Waits for the turn."""


class Conversations(TaskBatch[T]):
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
        self._params: Sequence[object] = ()
        self._ended: set[int] = set()

    def begin(self, prompts: Sequence[Prompt], params: Sequence[object], first: int = 0) -> None:
        self._params = params
        tasks = [Task(self, place, prompt, params[place]) for place, prompt in enumerate(prompts)]
        for task in tasks:
            task.answer.add_done_callback(partial(self._came, task.place))
        self.loop.submit(tasks)

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
        result: T | None = None
        error: BaseException | None = None
        try:
            result = self._talk(place, first, partial(self._ask, place))
        except GivenUp:
            error = CancelledError()
        except BaseException as raised:  # raised by `results`
            error = raised
        self._ended.add(place)
        self.loop.cancel(self, place)  # an agent has left requests open
        with self.loop.changed:
            self.under_way -= 1
            if error is None:
                self._end(place, result)
            else:
                self._fail(error)

    def _ask(self, place: int, ids: list[int]) -> Turn:
        if self.is_cancelled or place in self._ended:
            raise GivenUp
        return self.loop.ask(Task(self, place, {"prompt_token_ids": ids}, self._params[place]))

    def cancel(self) -> None:
        """A conversation ends when it wants its next turn, or waits for it."""
        super().cancel()
        self._end_calls()


class Episodes(Conversations[T]):
    """Conversations that ask for their first turn too: the engine generates nothing before they begin."""

    def begin(self, prompts: Sequence[Prompt], params: Sequence[object], first: int = 0) -> None:
        self._params = params
        for place in range(len(self)):
            self._start(place, NO_TURN)
