"""The order of prompts.

Owns one thing: an epoch's order depends on the seed and the epoch alone. TRL repeats the prompts for their groups.
"""

from collections.abc import Callable, Iterator

from torch.utils.data import Sampler
from trl.trainer.utils import RepeatSampler


class OrderByEpoch(Sampler[int]):
    """TRL's sampler, shuffled anew from `seed + epoch` at the start of each epoch. The order of epoch 0 is TRL's.

    TRL's sampler goes on with its generator from epoch to epoch. So a run that resumes in its second epoch would get
    the order of the first one again.
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
