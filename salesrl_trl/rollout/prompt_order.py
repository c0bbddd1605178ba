"""The order of prompts.

Owns one thing: that an epoch's order depends on the seed and the epoch alone. How prompts are repeated for their
groups is TRL's.
"""

from collections.abc import Callable, Iterator

from torch.utils.data import Sampler
from trl.trainer.utils import RepeatSampler


class OrderByEpoch(Sampler[int]):
    """TRL's sampler, shuffled anew from `seed + epoch` at the start of each epoch.

    TRL's own draws each epoch's order from where its generator stands, so that a run that resumes in its second epoch
    sees the order of the first one again.

    Args:
        sampler (`RepeatSampler`):
            TRL's; epoch 0 is as it would be without this.
        epoch (`Callable[[], int]`):
            The epoch that begins.
    """

    def __init__(self, sampler: RepeatSampler, epoch: Callable[[], int]) -> None:
        self._sampler = sampler
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self._sampler.shuffle:
            self._sampler.generator.manual_seed(self._sampler.seed + self._epoch())
        yield from self._sampler

    def __len__(self) -> int:
        return len(self._sampler)
