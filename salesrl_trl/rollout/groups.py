"""A generation batch that is trained on part by part, whole groups whose rewards are in first. TRL computes
advantages."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import is_tensor
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from salesrl_trl.kl.penalty import MicroBatch


def parts(size: int, micro_batch: int, group: int) -> list[range]:
    """The smallest parts of a generation batch that hold whole groups and whole micro-batches: places of each part, in
    order; one part where the batch can't be divided so. `size`: completions of this rank's generation batch."""
    part = math.lcm(micro_batch, group)
    if size % part:
        return [range(size)]
    return [range(first, first + part) for first in range(0, size, part)]


class Order(NamedTuple):
    """The order in which the parts of a generation batch were trained on. A sum of gradients depends on it."""

    parts: Sequence[int] = ()  # the first place of each; none where all rewards were in when the batch began
    seen: Sequence[int] = ()
    """How many micro-batches were known behind each one that was trained on before all rewards were in."""


AT_ONCE = Order()


class ScoredGroups:
    """The parts of a generation batch, and the micro-batches of those whose advantages are final. `recorded` is the
    order in which a replayed run trained on them: the replay repeats it once all are scored."""

    def __init__(self, size: int, micro_batch: int, group: int, recorded: Order = AT_ONCE) -> None:
        self.remaining = parts(size, micro_batch, group)  # parts without a micro-batch in the queue so far
        self.complete = bool(recorded.parts)  # whether every reward was in, on every rank, at the last `record`
        if recorded.parts:
            self.remaining.sort(key=lambda part: recorded.parts.index(part.start))
        self._released: list[int] = []
        self._seen = [*recorded.seen]
        self._taken = 0  # micro-batches that were trained on
        self.pending: list[range] = []
        """Parts this rank waits for. Until enough is scored, only the ranks with the most missing parts wait; on the
        others it is empty."""
        self._micro_batch = micro_batch
        self._ready: list[range] = []
        self._queue: deque[MicroBatch] = deque()

    def record(self, settled: torch.Tensor, rank: int, scored_fraction: float, wanted_fraction: float) -> None:
        """Record which rewards are in: `settled`, shape (world size, B), bool. Each rank has its own order, because no
        group lies on two ranks. While fewer completions are scored than wanted, the batch could be skipped, and no
        part is ready."""
        self.complete = bool(settled.all())
        pending_by_rank = [
            [part for part in self.remaining if not of_rank[part.start : part.stop].all()] for of_rank in settled
        ]
        own = pending_by_rank[rank]
        enough = scored_fraction >= wanted_fraction
        self._ready = [part for part in self.remaining if enough and part not in own]
        # While too little is scored, no rank releases a part. The next reward most likely comes where most rewards are
        # missing. A rank that waited for its own last group would hold up the others, although enough is scored.
        self.pending = own if enough or len(own) == max(map(len, pending_by_rank)) else []

    def release(self, output: Mapping[str, object]) -> None:
        """Put the micro-batches of the ready parts, whose advantages are final, into the queue. `output`: the whole
        generation batch as TRL made it: tensors of shape (B, ...), lists of length B, scalars, pixels of pictures."""
        by_sample = split_pixel_values_by_grid(output)  # a picture's pixels are many rows of their tensor
        for part in list(self.remaining) if self.complete else self._ready:
            self.remaining.remove(part)
            self._released.append(part.start)
            for first in range(part.start, part.stop, self._micro_batch):
                rows = slice(first, first + self._micro_batch)
                self._queue.append(
                    unsplit_pixel_values_by_grid({
                        name: value[rows] if isinstance(value, list) or (is_tensor(value) and value.ndim) else value
                        for name, value in by_sample.items()
                    })
                )  # fmt: skip
        self._ready = []

    @property
    def has_next(self) -> bool:
        return bool(self._queue)

    @property
    def is_empty(self) -> bool:
        return not self.remaining and not self._queue

    def next(self) -> MicroBatch:
        if not self.complete:
            self._seen.append(len(self._queue) - 1)
        self._taken += 1
        return self._queue.popleft()

    @property
    def following(self) -> list[MicroBatch]:
        """The micro-batches behind the next one, as far as they are known: passes may be shared with them."""
        return list(self._queue)[: self._seen[self._taken - 1] if self._taken <= len(self._seen) else None]

    @property
    def order(self) -> Order:
        return Order(parts=[*self._released, *(part.start for part in self.remaining)], seen=self._seen)
