"""What is trained on or evaluated next: the order of prompts, micro-batches that are read ahead, and the generation
batches among them that may be generated now. Owns the staleness bound. The pipeline generates."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler
from trl.trainer.utils import RepeatSampler

from salesrl_trl.rollout.in_flight import Rollout
from salesrl_trl.types import Example

MicroBatches = list[list[Example]]
Update = tuple[MicroBatches, object]
"""Micro-batches of one optimizer step, and the number of items in them, as transformers counts it."""
Pull = Callable[[Iterator[object]], Update]
"""Takes the micro-batches of one step; none at the end."""


@dataclass(eq=False, kw_only=True, slots=True)
class GenerationWindow:
    first: int  # micro-step at which it is first trained on
    update: int  # optimizer steps done by then
    inputs: list[Example]
    rollout: Rollout | None = None


class RolloutSchedule:
    """Generation batches in the order they are trained on. `lookahead`: optimizer steps by which a rollout may be
    ahead of the step that trains on it. `window`: micro-steps between two generation batches."""

    def __init__(self, lookahead: int, window: int) -> None:
        self.lookahead = lookahead  # may move in the midst of a run. What is in flight stays in flight
        self._window = window
        self._windows: deque[GenerationWindow] = deque()
        self._micro_step = 0
        self._update = 0
        self._generates = True  # the next micro-step, whatever its number

    def restart(self, micro_step: int, update: int, has_batch: bool) -> list[Rollout]:
        """Begin after these micro-steps and optimizer steps. Returns rollouts that nobody will train on. `has_batch`:
        a generation batch is there to go on with. If not, as after a resume, the first micro-step generates, whatever
        its number."""
        left = [window.rollout for window in self._windows if window.rollout is not None]
        self._windows.clear()
        self._micro_step, self._update, self._generates = micro_step, update, not has_batch
        return left

    def add(self, micro_batches: Sequence[list[Example]]) -> list[GenerationWindow]:
        """The next optimizer step will have these micro-batches. Returns the generation batches among them."""
        new = [
            GenerationWindow(first=number, update=self._update, inputs=inputs)
            for number, inputs in enumerate(micro_batches, start=self._micro_step)
            if number % self._window == 0 or (self._generates and number == self._micro_step)
        ]
        self._windows.extend(new)
        self._micro_step += len(micro_batches)
        self._update += 1
        self._generates = False
        return new

    def due(self, micro_step: int, update: int) -> list[GenerationWindow]:
        """The batches to generate before `micro_step` of optimizer step `update`, the earliest first. Without
        lookahead it is the one that this micro-step trains on, so that random numbers are drawn in TRL's order."""
        waiting = (window for window in self._windows if window.rollout is None)
        if not self.lookahead:
            return [window for window in waiting if window.first == micro_step]
        return [window for window in waiting if window.update - update <= self.lookahead]

    @property
    def updates(self) -> list[int]:
        """Optimizer steps done before each batch that nobody has taken yet, as far as they are read."""
        return [window.update for window in self._windows]

    def launched(self) -> dict[int, Rollout]:
        """The rollouts that nobody has taken yet, by their first micro-step."""
        return {window.first: window.rollout for window in self._windows if window.rollout is not None}

    def take(self, micro_step: int, inputs: object) -> Rollout | None:
        while self._windows and self._windows[0].first < micro_step:
            self._windows.popleft()
        if not self._windows or self._windows[0].first != micro_step or self._windows[0].inputs is not inputs:
            return None
        return self._windows.popleft().rollout


class UpdatesAhead:
    """Micro-batches of later optimizer steps, `depth` of them, pulled ahead of time, over an epoch's end too. A
    resumed run pulls again what was pulled and not trained on: no prompt is lost, and none comes twice. `record` gets
    the micro-batches of each step once, in order."""

    def __init__(self, depth: int, record: Callable[[MicroBatches], None]) -> None:
        self.depth = depth
        self._record = record
        self._pulled: deque[tuple[Update, bool]] = deque()  # True: the first of an epoch that was begun ahead
        self._iterator: Iterator[object] | None = None
        self.dataloader: Iterable[object] = ()  # what training goes through once, and then perhaps once more
        self.epoch = 0  # epoch of the micro-batches that are pulled now. It may be later than the epoch in training.

    def restart(self) -> None:
        self._pulled.clear()
        self._iterator, self.dataloader = None, ()

    def next(self, epoch: int, iterator: Iterator[object], pull: Pull, left: int) -> Update:
        """Micro-batches of the next optimizer step. `epoch` is in training, `iterator` has its micro-batches, and
        `left` steps are to come, with this one."""
        # 1. the epoch that is read: it may be later than the one in training, whose iterator is left aside then
        if self._iterator is None or self.epoch < epoch:
            self._iterator, self.epoch = iterator, epoch
        # 2. read so many steps ahead, over an epoch's end too, and none beyond the last
        while len(self._pulled) < min(self.depth + 1, max(left, 1)):
            update, is_first = pull(self._iterator), False
            if not update[0] and self._pulled:  # the epoch is over, the training is not
                self.epoch += 1
                self._iterator, is_first = self._following(), True
                update = pull(self._iterator)
            if not update[0]:
                break
            self._record(update[0])
            self._pulled.append((update, is_first))
        # 3. hand out the oldest
        if not self._pulled:
            return [], None
        update, is_first = self._pulled.popleft()
        if is_first:  # the draw with which `DataLoader` seeds its workers, when the epoch begins
            torch.empty((), dtype=torch.int64).random_()
        return update

    def _following(self) -> Iterator[object]:
        """The micro-batches of the next epoch. Torch's generator stays as it is: a dataloader draws from it when it
        begins. So samples are those without a lookahead."""
        with torch.random.fork_rng(devices=[]):
            micro_batches = iter(self.dataloader)
            first = list(itertools.islice(micro_batches, 1))
        return itertools.chain(first, micro_batches)


class OrderByEpoch(Sampler[int]):
    """TRL's sampler, shuffled anew from `seed + epoch` at the start of each epoch. Epoch 0 is TRL's. TRL's goes on
    with its generator from epoch to epoch, so a run resumed in its second would get the order of the first again."""

    def __init__(self, sampler: RepeatSampler, updates: UpdatesAhead) -> None:
        self._sampler, self._updates = sampler, updates

    def __iter__(self) -> Iterator[int]:
        if self._sampler.shuffle:
            self._sampler.generator.manual_seed(self._sampler.seed + self._updates.epoch)
        yield from self._sampler

    def __len__(self) -> int:
        return len(self._sampler)
