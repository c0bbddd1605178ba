"""The size of an update whose failed completions are out of its loss. The trainer's overrides of a micro-step call it.

No token of a failed completion counts, but TRL's loss still divides by what an update holds (`UNITS`), over all ranks.
The update becomes as large as without them by the factor: units of the update / units of what is left. It is in each
micro-batch's loss where the update is known when it begins. Else the gradient is multiplied before it is clipped.
"""

import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence

import torch
from accelerate import PartialState
from accelerate.utils import reduce

from salesrl_trl.kl.penalty import MicroBatch, loss_mask

FAILED = "is_failed"
"""Name in a micro-batch: which completions are out, shape (B,), bool. Absent where none of the generation batch is."""
COMPLETIONS, TOKENS, MICRO_BATCHES = "completions", "tokens", "micro-batches"
UNITS = {
    **dict.fromkeys(("grpo", "sapo", "dr_grpo", "luspo"), COMPLETIONS),
    **dict.fromkeys(("dapo", "cispo", "vespo"), TOKENS),
    "bnpo": MICRO_BATCHES,
}
"""By TRL's `loss_type`: the units over which its loss is a mean. Those of tokens divide by `num_items_in_batch`, the
tokens of a generation batch. With bnpo, each micro-batch has the mean of its tokens."""

NO_MEANS_OF_TOKENS = ("entropy_coef", "aux_loss")
"""Figures that TRL's loss records beside means over a micro-batch's tokens."""


class Normaliser:
    """The factor of one trainer's updates. `can_rescale`: a gradient may be multiplied as a whole, before it is
    clipped. Not with DeepSpeed, which steps in `backward`, and not where the loss has further terms. Each generation
    batch of an update then has its own factor."""

    def __init__(self, loss_type: str, *, can_rescale: bool) -> None:
        self._unit = UNITS.get(loss_type, COMPLETIONS)
        self._can_rescale = can_rescale
        self.forget()

    def forget(self) -> None:
        self.factor = 1.0
        """Of the advantages and the KL coefficients of the micro-batch under way: TRL's policy losses are in
        proportion to the advantages."""
        self.is_empty = False
        """Whether nothing of the update is left, on any rank. Known when its last micro-batch went backward."""
        self._left = self._known = 0
        self._evaluated = self._filled = 0
        self._counts: torch.Tensor | None = None
        self._has_failed = False
        self._loss: torch.Tensor | float = 0.0

    def begin(self, batches: Sequence[MicroBatch], update: int, *, is_last: bool, in_parts: bool) -> None:
        """Begin a micro-batch, the first of `batches`; a collective where completions of it failed. The others are
        those of its generation batch that come after it, as far as they are known. `update`: micro-batches of this
        update; `is_last`: it is the last of them. `in_parts`: failures were not all known when the first micro-batch
        of the batch was trained on."""
        begins, left = not self._left, self._left or update
        if begins:
            self.forget()
            self.is_empty = True
        self._left = 0 if is_last else left - 1
        if self._known:
            self._known -= 1
            return
        part = batches[:left]
        if not self._can_rescale or (begins and len(part) == left and not in_parts):
            self._known = len(part) - 1
            self.factor = self._factor_of(part)
            return
        counts = self._counts_of(batches[0], update if in_parts else None)
        self._counts = counts if self._counts is None else self._counts + counts
        self._has_failed = self._has_failed or FAILED in batches[0]

    def begin_evaluation(self, batch: MicroBatch) -> None:
        """Begin a batch of an evaluation, which is no part of an update; a collective where completions failed."""
        self.is_empty = True
        self.factor = self._factor_of([batch])
        self._evaluated += 1
        self._filled += not self.is_empty

    def loss_of_evaluation(self, mean: float) -> float | None:
        """The mean loss of an evaluation over batches with something left, from that over all, whose empty ones have
        0. `None` if nothing is left. The next evaluation begins."""
        every, filled, self._evaluated, self._filled = self._evaluated, self._filled, 0, 0
        return mean * every / filled if filled else None

    def end(self, loss: torch.Tensor, weights: Iterable[torch.nn.Parameter], *, is_last: bool) -> torch.Tensor:
        """A micro-batch went backward. After the last one of an update, the gradients of `weights` get their factor; a
        collective. Returns the loss for the log."""
        if self._counts is None:
            return loss
        self._loss = self._loss + loss
        if not is_last:
            return loss
        if not self._has_failed:
            self.is_empty = False
            return loss
        factor = self._factor(self._counts)
        if factor == 1:
            return loss
        for weight in weights:
            if weight.grad is not None:
                weight.grad.mul_(factor)
        return loss + (factor - 1) * self._loss

    def _factor_of(self, part: Sequence[MicroBatch]) -> float:
        if FAILED not in part[0]:
            self.is_empty = False
            return 1.0
        return self._factor(torch.stack([self._counts_of(batch) for batch in part]).sum(dim=0))

    def _factor(self, counts: torch.Tensor) -> float:
        """All units by those that are left; a collective."""
        every, left, filled = reduce(counts, "sum").tolist()
        self.is_empty = self.is_empty and not filled
        return every / left if filled and left else 1.0

    def _counts_of(self, batch: MicroBatch, update: int | None = None) -> torch.Tensor:
        """Units of a micro-batch and of what is left of it, and 1 if anything is. Shape (3,), float64. `update`:
        the micro-batches of the update, where `num_items_in_batch` has the failed completions' tokens too."""
        mask = batch["completion_mask"]
        failed = batch.get(FAILED, torch.zeros(len(mask), dtype=torch.bool, device=mask.device))  # (B,)
        left = (~failed).sum()
        filled, items = left > 0, batch["num_items_in_batch"]
        if self._unit == COMPLETIONS:
            units = (len(failed), left)
        elif self._unit == MICRO_BATCHES:
            units = (1, filled)
        elif update is None:  # TRL divides by the tokens of what is left
            units = (1, items > 0)
        else:  # all micro-batches' add up to the tokens' share
            tokens = loss_mask(batch).sum().double()
            units = (1, tokens * update * PartialState().num_processes / items.clamp(min=1))
        return torch.stack([torch.as_tensor(count, device=mask.device).double() for count in (*units, filled)])


def leave_out_empty(metrics: MutableMapping[str, list[float]], before: Mapping[str, int]) -> None:
    """Leave a micro-batch of which no token counts, on any rank, out of TRL's means over micro-batches: NaN for its 0.
    `before`: number of values by name before that micro-batch."""
    if metrics["entropy"][-1] != 0.0:  # the mean over tokens of all ranks; no token has none
        return
    for name, values in metrics.items():
        if name not in NO_MEANS_OF_TOKENS:
            values[before.get(name, 0) :] = [math.nan] * (len(values) - before.get(name, 0))
