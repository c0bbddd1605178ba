"""Which generation batches come, in which order, and which of them may be generated now.

Owns the staleness bound, and no model: pure. What is done with a generation batch is the pipeline's.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Update = tuple[list[Any], Any]
"""Micro-batches of one optimizer step, and what transformers counted in them."""


@dataclass(eq=False, kw_only=True, slots=True)
class Window:
    """A generation batch to come."""

    first: int
    """Micro-step at which it is first trained on."""
    update: int
    """Optimizer steps done by then."""
    inputs: Any
    rollout: Any = None
    """What came of it, once it was generated."""


class Schedule:
    """Generation batches in the order they are trained on.

    Args:
        lookahead (`int`):
            Optimizer steps that a rollout may be ahead of the one it is trained in: its staleness.
        window (`int`):
            Micro-steps between two generation batches, `steps_per_generation * num_iterations`.
    """

    def __init__(self, lookahead: int, window: int) -> None:
        self._lookahead = lookahead
        self._window = window
        self._windows: deque[Window] = deque()
        self._micro_step = 0
        self._update = 0
        self._generates = True  # the next micro-step, whatever its number

    def restart(self, micro_step: int, update: int, has_batch: bool) -> list[Any]:
        """Begin at these counts. Returns rollouts that nobody will train on.

        Args:
            micro_step (`int`):
                Micro-steps done, as TRL counts them.
            update (`int`):
                Optimizer steps done.
            has_batch (`bool`):
                Whether a generation batch is at hand to go on with in the middle of a window. Where not, as after a
                resume, the first micro-step generates whatever its number.
        """
        left = [window.rollout for window in self._windows if window.rollout is not None]
        self._windows.clear()
        self._micro_step, self._update, self._generates = micro_step, update, not has_batch
        return left

    def add(self, micro_batches: Sequence[object]) -> list[Window]:
        """The next optimizer step will have these micro-batches. Returns the generation batches among them."""
        new = [
            Window(first=number, update=self._update, inputs=inputs)
            for number, inputs in enumerate(micro_batches, start=self._micro_step)
            if number % self._window == 0 or (self._generates and number == self._micro_step)
        ]
        self._windows.extend(new)
        self._micro_step += len(micro_batches)
        self._update += 1
        self._generates = False
        return new

    def due(self, micro_step: int, update: int) -> list[Window]:
        """What is to be generated before `micro_step` of optimizer step `update`, the earliest first.

        Without lookahead, the batch that this micro-step trains on: the generator's and the shuffle's draws then come
        in TRL's order.
        """
        waiting = (window for window in self._windows if window.rollout is None)
        if not self._lookahead:
            return [window for window in waiting if window.first == micro_step]
        return [window for window in waiting if window.update - update <= self._lookahead]

    def take(self, micro_step: int, inputs: object) -> Any:
        """The rollout of these inputs, which leaves the schedule; `None` where there is none."""
        while self._windows and self._windows[0].first < micro_step:
            self._windows.popleft()
        if not self._windows or self._windows[0].first != micro_step or self._windows[0].inputs is not inputs:
            return None
        return self._windows.popleft().rollout


class UpdatesAhead:
    """Micro-batches of the optimizer steps to come, pulled before their time, over an epoch's end too.

    What is pulled and not trained on is pulled again after a resume, which counts the steps done: no prompt is lost
    and none comes twice.

    Args:
        depth (`int`):
            Optimizer steps to pull ahead.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._pulled: deque[tuple[Update, bool]] = deque()  # and whether an epoch begins with it that was begun here
        self._iterator: Iterator[object] | None = None
        self.epoch = 0
        """Epoch that is pulled from; ahead of the one in training at its end."""

    def restart(self) -> None:
        """Forget what was pulled."""
        self._pulled.clear()
        self._iterator = None

    def next(
        self,
        epoch: int,
        iterator: Iterator[object],
        following: Callable[[], Iterator[object]],
        pull: Callable[[Iterator[object]], Update],
        left: int,
        seen: Callable[[list[Any]], None],
        begins: Callable[[], None] = lambda: None,
    ) -> Update:
        """Micro-batches of the next optimizer step.

        Args:
            epoch (`int`):
                The one in training.
            iterator (`Iterator`):
                Its micro-batches; left aside where they are pulled from already.
            following (`Callable[[], Iterator]`):
                Micro-batches of the next epoch, whose number `epoch` has by then.
            pull (`Callable[[Iterator], Update]`):
                Takes one step's micro-batches, none at the end.
            left (`int`):
                Optimizer steps to come, this one included.
            seen (`Callable[[list], None]`):
                Told of each step's micro-batches once, in order.
            begins (`Callable[[], None]`, *optional*):
                Called when the first step of an epoch is handed out that was made by `following`.
        """
        if self._iterator is None or self.epoch < epoch:
            self._iterator, self.epoch = iterator, epoch
        while len(self._pulled) < min(self._depth + 1, max(left, 1)):
            update, is_first = pull(self._iterator), False
            if not update[0] and self._pulled:  # this epoch is over, and not the training
                self.epoch += 1
                self._iterator, is_first = following(), True
                update = pull(self._iterator)
            if not update[0]:
                break
            seen(update[0])
            self._pulled.append((update, is_first))
        if not self._pulled:
            return [], None
        update, is_first = self._pulled.popleft()
        if is_first:
            begins()
        return update
