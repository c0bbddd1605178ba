"""The batches of a reward that have no result yet.

Owns which batches these are, the stop that holds for all of them, and the line for a person who waits. The module
`batch` owns how a batch scores its completions.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from salesrl_trl.reward.batch import RewardBatch
from salesrl_trl.timing import Span


class OpenBatches:
    """Batches from their beginning to their result, in the order they began. Iterating is safe from any thread.

    Args:
        make (`Callable[[Sequence[Any], int, int, int], RewardBatch]`):
            Makes a batch of these rows: on the tracks of this lane, with this number, with so many completions of a
            prompt.
        under_way (`Callable[[RewardBatch], list[str]]`):
            The stages of a batch that are under way, one entry for each completion and stage.
    """

    def __init__(
        self,
        make: Callable[[Sequence[Any], int, int, int], RewardBatch],
        under_way: Callable[[RewardBatch], list[str]],
    ) -> None:
        self._make = make
        self._numbers = itertools.count()
        self._under_way = under_way
        self._open: list[RewardBatch] = []
        self._stopped: str | None = None

    def __iter__(self) -> Iterator[RewardBatch]:
        return iter(list(self._open))

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is scored any more."""
        return self._stopped is not None

    def begin(self, rows: Sequence[Any], group: int = 1) -> RewardBatch:
        """A batch of completions to these rows, none of which is started yet. From any thread.

        Args:
            rows (`Sequence`):
                What the reward keeps of each completion's row: `BatchedReward.row_of`.
            group (`int`, *optional*, defaults to `1`):
                Completions of a prompt. They are neighbours.
        """
        taken = {other.lane for other in self}
        lane = next(lane for lane in itertools.count() if lane not in taken)
        batch = self._make(rows, lane, next(self._numbers), group)
        self._open.append(batch)  # before looking, for the event loop's thread may stop all at this moment
        if self._stopped is not None:
            batch.cut_off(self._stopped)
        return batch

    def close(self, batch: RewardBatch) -> None:
        """Forget a batch that has its result."""
        with contextlib.suppress(ValueError):  # not a new list: another thread may append to it now
            self._open.remove(batch)

    def give_up(self, batch: RewardBatch) -> None:
        """Cancel what is under way in a batch that nobody waits for, and forget it."""
        batch.cancel()
        self.close(batch)

    def cut_off(self, reason: str) -> None:
        """Score no more, in no batch: what is not scored, and all that comes, is missing with this reason."""
        self._stopped = reason
        for batch in self:
            batch.cut_off(reason)

    def resume(self) -> None:
        """Score again what begins from now on."""
        self._stopped = None

    def status(self) -> str:
        """The oldest batch in words for the console: its completions by stage. From any thread."""
        batches = list(self)
        if not batches:
            return "none is being scored"
        batch = batches[0]
        stages = ", ".join(f"{count} in {name}" for name, count in Counter(self._under_way(batch)).items())
        behind = f"; {len(batches) - 1} more batches in flight" if len(batches) > 1 else ""
        if batch.times.first is None:
            return f"none is being scored yet{behind}"
        if batch.is_settled():
            return f"this rank's are scored, another's may be out{behind}"
        if not stages:
            return f"of {len(batch)} completions some are out{behind}"
        return f"of {len(batch)} completions {stages}{behind}"

    def spans(self) -> list[Span]:
        """The stages of these batches, those under way as failed. From any thread."""
        return [span for batch in self for span in batch.spans_so_far()]
