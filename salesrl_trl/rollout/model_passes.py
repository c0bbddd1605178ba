"""The passes through the model for one update: which are made, and which are left out.

`shared_prompts` makes the passes, `correction` computes what follows from the old log-probs.
"""

import math
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch

from salesrl_trl.rollout.correction import CorrectionAtStep
from salesrl_trl.rollout.in_flight import Rollout
from salesrl_trl.shared_prompts.ahead import Ahead, MicroBatch
from salesrl_trl.shared_prompts.shared_passes import LogProbs, SharedPrompts
from salesrl_trl.update.ledger import Ledger


class Passes:
    """The passes of one trainer, made by `prompts`. `most_tokens`, `weights` and `is_light`: as in `Ahead`.
    `correction` is that of the pass that trains; `None` where TRL's own pass for old log-probs is needed. `in_order`:
    a group's completions stay together. Else TRL shuffles a generation batch."""

    def __init__(
        self,
        prompts: SharedPrompts,
        *,
        most_tokens: int | None,
        weights: int,
        is_light: bool,
        correction: CorrectionAtStep | None,
        ledger: Ledger,
        in_order: bool,
    ) -> None:
        self.in_order = in_order
        self._prompts = prompts
        self._ahead = Ahead(prompts, most_tokens, weights, is_light=is_light)
        self._correction = correction
        self._ledger = ledger

    def forget(self) -> None:
        self._ahead.forget()
        if self._correction is not None:
            self._correction.forget()

    def begin(self, batches: Sequence[MicroBatch], update: int, *, is_last: bool) -> MicroBatch:
        self._ahead.begin(batches, update, is_last=is_last)
        return batches[0]

    def log_probs(
        self, inputs: MutableMapping[str, object] | None, upstream: Callable[..., LogProbs], *args: Any, **kwargs: Any
    ) -> LogProbs:
        """As `SharedPrompts.log_probs`. `inputs`: the micro-batch whose loss is computed, if one is."""
        if inputs is None or not torch.is_grad_enabled():
            return self._prompts.log_probs(upstream, *args, **kwargs)
        passed = self._ahead.log_probs(upstream, *args, **kwargs)
        if self._correction is not None:
            self._correction.apply(inputs, passed[0])
        return passed

    @property
    def shares_prompts(self) -> bool:
        """Whether a batch has gone that way, and was compared with TRL's."""
        return self._prompts.is_on and self._prompts.is_checked

    @property
    def has_prompt(self) -> list[bool] | None:
        return self._ahead.has_prompt

    def leave_out_old(self, rollout: Rollout | None, is_reference: bool, are_weights_checked: bool) -> bool:
        """Whether the pass that trains gives the old log-probs of a rollout. `are_weights_checked`: the check of
        vLLM's weights, which needs old log-probs, is over."""
        if rollout is None or is_reference or self._correction is None:
            return False
        rollout.is_corrected_at_step = rollout.is_trained_on and are_weights_checked
        return rollout.is_corrected_at_step

    def drain_correction(self, is_skipped: bool) -> dict[str, float]:
        """TRL's figures of the correction of a batch that is done, by name; a collective. NaN for a skipped batch,
        whose tokens went through no model."""
        if self._correction is None or not self._correction.is_due:
            return {}
        figures, effect = self._correction.drain()
        self._ledger.record_correction("train", *effect)
        return dict.fromkeys(figures, math.nan) if is_skipped else figures
