"""What is trained on next: the order of prompts, prefetched micro-batches, and which generation batches are due.
Enforces the staleness bound. The pipeline generates."""

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
"""Micro-batches of one optimizer step, and their number of items as counted by transformers."""
Pull = Callable[[Iterator[object]], Update]
"""Reads the micro-batches of one step; none at the end."""


@dataclass(eq=False, kw_only=True, slots=True)
class GenerationWindow:
    first: int  # first micro-step that trains on it
    update: int  # optimizer steps done by then
    inputs: list[Example]
    rollout: Rollout | None = None


class RolloutSchedule:
    """Generation batches in training order. `lookahead`: optimizer steps by which a rollout may precede the step that
    trains on it. `window`: micro-steps between two generation batches."""

    def __init__(self, lookahead: int, window: int) -> None:
        self.lookahead = lookahead  # may change during a run; rollouts in flight stay in flight
        self._window = window
        self._windows: deque[GenerationWindow] = deque()
        self._micro_step = 0
        self._update = 0
        self._generates = True  # whether the next micro-step generates, whatever its number

    def restart(self, micro_step: int, update: int, has_batch: bool) -> list[Rollout]:
        """Start after these micro-steps and optimizer steps. Returns rollouts that will not be trained on.
        `has_batch`: a generation batch is in progress; if not, e.g. after a resume, the first micro-step generates,
        whatever its number."""
        left = [window.rollout for window in self._windows if window.rollout is not None]
        self._windows.clear()
        self._micro_step, self._update, self._generates = micro_step, update, not has_batch
        return left

    def add(self, micro_batches: Sequence[list[Example]]) -> list[GenerationWindow]:
        """Add the next optimizer step's micro-batches. Returns the generation batches among them."""
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
        """The batches to generate before `micro_step` of optimizer step `update`, earliest first. Without lookahead,
        only the one this micro-step trains on, so that random numbers are drawn in TRL's order."""
        waiting = (window for window in self._windows if window.rollout is None)
        if not self.lookahead:
            return [window for window in waiting if window.first == micro_step]
        return [window for window in waiting if window.update - update <= self.lookahead]

    @property
    def updates(self) -> list[int]:
        """Optimizer steps done before each batch not yet consumed, as far as read."""
        return [window.update for window in self._windows]

    def launched(self) -> dict[int, Rollout]:
        """The rollouts not yet consumed, by their first micro-step."""
        return {window.first: window.rollout for window in self._windows if window.rollout is not None}

    def take(self, micro_step: int, inputs: object) -> Rollout | None:
        while self._windows and self._windows[0].first < micro_step:
            self._windows.popleft()
        if not self._windows or self._windows[0].first != micro_step or self._windows[0].inputs is not inputs:
            return None
        return self._windows.popleft().rollout


class UpdatesAhead:
    """Prefetched micro-batches of the next `depth` optimizer steps, also across epochs. A resumed run rereads
    prefetched but untrained prompts, so none is lost or repeated. `record` is called with each step's micro-batches
    once, in order."""

    def __init__(self, depth: int, record: Callable[[MicroBatches], None]) -> None:
        self.depth = depth
        self._record = record
        self._pulled: deque[tuple[Update, bool]] = deque()  # True: the first of a prefetched epoch
        self._iterator: Iterator[object] | None = None
        self.dataloader: Iterable[object] = ()  # what training iterates over, possibly repeatedly
        self.epoch = 0  # epoch being read, which may be later than the epoch in training

    def restart(self) -> None:
        self._pulled.clear()
        self._iterator, self.dataloader = None, ()

    def next(self, epoch: int, iterator: Iterator[object], pull: Pull, left: int) -> Update:
        """Micro-batches of the next optimizer step. `epoch`: in training; `iterator`: its micro-batches; `left`:
        remaining steps including this one."""
        # 1. the epoch being read, which may be later than the one in training
        if self._iterator is None or self.epoch < epoch:
            self._iterator, self.epoch = iterator, epoch
        # 2. prefetch steps, also across epochs, but none beyond the last
        while len(self._pulled) < min(self.depth + 1, max(left, 1)):
            update, is_first = pull(self._iterator), False
            if not update[0] and self._pulled:  # the epoch is over, but not the training
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
        if is_first:  # the draw with which `DataLoader` seeds its workers at the start of an epoch
            torch.empty((), dtype=torch.int64).random_()
        return update

    def _following(self) -> Iterator[object]:
        """The micro-batches of the next epoch. Preserves torch's generator, from which a dataloader draws when it
        starts, so that samples do not depend on the lookahead."""
        with torch.random.fork_rng(devices=[]):
            micro_batches = iter(self.dataloader)
            first = list(itertools.islice(micro_batches, 1))
        return itertools.chain(first, micro_batches)


class OrderByEpoch(Sampler[int]):
    """TRL's sampler, reshuffled from `seed + epoch` at the start of each epoch. Epoch 0 equals TRL's. TRL's generator
    carries over between epochs, so a run resumed in its second epoch would repeat the first one's order."""

    def __init__(self, sampler: RepeatSampler, updates: UpdatesAhead) -> None:
        self._sampler, self._updates = sampler, updates

    def __iter__(self) -> Iterator[int]:
        if self._sampler.shuffle:
            self._sampler.generator.manual_seed(self._sampler.seed + self._updates.epoch)
        yield from self._sampler

    def __len__(self) -> int:
        return len(self._sampler)
