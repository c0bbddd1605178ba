"""Loss normalisation for updates with failed completions, which are excluded from the loss.

Tokens of failed completions do not count, but TRL's loss still divides by all units of an update (`UNITS`), over all
ranks. The factor "units of the update / remaining units" restores the update's size. It is applied to each
micro-batch's loss if the update is known when it begins, otherwise to the gradient before clipping.
"""

import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence

import torch
from accelerate import PartialState
from accelerate.utils import reduce

from salesrl_trl.kl.penalty import FAILED, MicroBatch, loss_mask

COMPLETIONS, TOKENS, MICRO_BATCHES = "completions", "tokens", "micro-batches"
UNITS = {
    **dict.fromkeys(("grpo", "sapo", "dr_grpo", "luspo"), COMPLETIONS),
    **dict.fromkeys(("dapo", "cispo", "vespo"), TOKENS),
    "bnpo": MICRO_BATCHES,
}
"""The units that TRL's `loss_type` averages over. Token losses divide by `num_items_in_batch`, the tokens of a
generation batch; bnpo averages over each micro-batch's tokens."""

NO_MEANS_OF_TOKENS = ("entropy_coef", "aux_loss")
"""Metrics of TRL's loss that are not means over a micro-batch's tokens."""


class Normaliser:
    """The factor of one trainer's updates. `can_rescale`: the whole gradient may be rescaled before clipping. Not with
    DeepSpeed, which steps in `backward`, nor if the loss has additional terms; then each generation batch of an update
    has its own factor."""

    def __init__(self, loss_type: str, *, can_rescale: bool) -> None:
        self._unit = UNITS.get(loss_type, COMPLETIONS)
        self._can_rescale = can_rescale
        self.forget()

    def forget(self) -> None:
        self.factor = 1.0
        """Multiplies the current micro-batch's advantages and KL coefficients: TRL's policy losses are proportional to
        the advantages."""
        self.is_empty = False
        """Whether nothing of the update remains on any rank. Known after its last micro-batch's backward pass."""
        self._left = self._known = 0
        self._evaluated = self._filled = 0
        self._counts: torch.Tensor | None = None
        self._has_failed = False
        self._loss: torch.Tensor | float = 0.0

    def begin(self, batches: Sequence[MicroBatch], update: int, *, is_last: bool, in_parts: bool) -> None:
        """Begin a micro-batch, the first of `batches`; a collective if some of its completions failed. The others
        follow it in its generation batch, as far as known. `update`: micro-batches of this update; `is_last`: whether
        it is the last. `in_parts`: not all failures were known when the batch's first micro-batch was trained on."""
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
        """Begin an evaluation batch, outside of updates; a collective if completions failed."""
        self.is_empty = True
        self.factor = self._factor_of([batch])
        self._evaluated += 1
        self._filled += not self.is_empty

    def loss_of_evaluation(self, mean: float) -> float | None:
        """The mean evaluation loss over non-empty batches, given the mean over all, where empty ones count as 0.
        `None` if all are empty. Resets for the next evaluation."""
        every, filled, self._evaluated, self._filled = self._evaluated, self._filled, 0, 0
        return mean * every / filled if filled else None

    def end(self, loss: torch.Tensor, weights: Iterable[torch.nn.Parameter], *, is_last: bool) -> torch.Tensor:
        """End a micro-batch's backward pass. After the last one of an update, rescale the gradients of `weights`; a
        collective. Returns the loss to log."""
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
        """All units divided by the remaining ones; a collective."""
        every, left, filled = reduce(counts, "sum").tolist()
        self.is_empty = self.is_empty and not filled
        return every / left if filled and left else 1.0

    def _counts_of(self, batch: MicroBatch, update: int | None = None) -> torch.Tensor:
        """Units of a micro-batch, its remaining units, and 1 if any remain: shape (3,), float64. `update`: the
        update's micro-batches, if `num_items_in_batch` includes the failed completions' tokens."""
        mask = batch["completion_mask"]
        failed = batch.get(FAILED, torch.zeros(len(mask), dtype=torch.bool, device=mask.device))  # (B,)
        left = (~failed).sum()
        filled, items = left > 0, batch["num_items_in_batch"]
        if self._unit == COMPLETIONS:
            units = (len(failed), left)
        elif self._unit == MICRO_BATCHES:
            units = (1, filled)
        elif update is None:  # TRL divides by the remaining tokens
            units = (1, items > 0)
        else:  # over all micro-batches, these sum to the share of tokens
            tokens = loss_mask(batch).sum().double()
            units = (1, tokens * update * PartialState().num_processes / items.clamp(min=1))
        return torch.stack([torch.as_tensor(count, device=mask.device).double() for count in (*units, filled)])


def leave_out_empty(metrics: MutableMapping[str, list[float]], before: Mapping[str, int]) -> None:
    """Exclude a micro-batch without any counting token on any rank from TRL's means over micro-batches: NaN instead of
    0. `before`: number of values by name before that micro-batch."""
    if metrics["entropy"][-1] != 0.0:  # the mean over all ranks' tokens, exactly 0 without tokens
        return
    for name, values in metrics.items():
        if name not in NO_MEANS_OF_TOKENS:
            values[before.get(name, 0) :] = [math.nan] * (len(values) - before.get(name, 0))
