"""The forward and backward passes of an update. One forward pass serves several micro-batches, each with its own loss
and `backward`, as in TRL. All backwards but the last stop at the log-probs, where gradients accumulate; the last one
continues through the model with all of them. If an update is the only one of its generation batch, the training
forward pass also provides the old log-probs."""

import contextlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from salesrl_trl.ground.process import patched
from salesrl_trl.kl.penalty import MicroBatch
from salesrl_trl.rollout.in_flight import Rollout
from salesrl_trl.rollout.several_sequences import SEQUENCES, log_probs
from salesrl_trl.shared_prompts.row_layout import Group
from salesrl_trl.shared_prompts.shared_passes import MOST_TOKENS, Columns, LogProbs, Pass, SharedPrompts
from salesrl_trl.update.correction import CorrectionAtStep

FILLING = 30_000_000_000_000
"""Tokens times weights of a forward pass that saturates a large GPU: 4,000 tokens with 7B, 60,000 with 0.5B. On an
H200 (`benchmarks.passes`), two or four times the tokens were at most an eighth faster."""


def unasked_tokens(weights: int, padded: int, fitting: int = 0, *, is_light: bool) -> int:
    """Default tokens per forward pass: as many as saturate a GPU, but no more than TRL's own pass for one micro-batch,
    `padded`. `is_light`: tokens need little memory (16 bits on a GPU, with gradient checkpointing). Then a pass may
    have as many as TRL's, up to four times those that saturate a GPU, or, if TRL's has fewer, as many as saturate one,
    up to `MOST_TOKENS`; with 0.5B that is about a GiB. `fitting`, if above 0, limits larger passes only."""
    filling = FILLING // max(weights, 1)
    most = min(4 * filling, padded, fitting or padded)
    return max(min(filling, MOST_TOKENS), most) if is_light else min(filling, padded)


class _Joined(torch.autograd.Function):
    """Log-probs and entropies of the last micro-batch: `apply(logps, entropies, waiting, *others)`. Its backward pass
    also propagates the other micro-batches' accumulated gradients."""

    @staticmethod
    def forward(
        ctx: Any, logps: torch.Tensor, entropies: torch.Tensor, waiting: Sequence[torch.Tensor], *others: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.waiting = waiting
        return logps.clone(), entropies.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *grads, None, *(tensor.grad for tensor in ctx.waiting)


@dataclass(frozen=True, slots=True)
class _Held:
    batch: MicroBatch
    logps: torch.Tensor
    entropies: torch.Tensor
    has_prompt: list[bool]


def _divided(logps: torch.Tensor, entropies: torch.Tensor, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probs and entropies of each micro-batch of `size` completions. The last one's backward pass propagates the
    gradients of all."""
    *firsts, last = zip(torch.split(logps, size), torch.split(entropies, size), strict=True)
    waiting = [tensor.detach().requires_grad_() for pair in firsts for tensor in pair]
    joined = _Joined.apply(*last, waiting, *(tensor for pair in firsts for tensor in pair))  # type: ignore[no-untyped-call]
    return [*zip(waiting[::2], waiting[1::2], strict=True), joined]


def unknown_logps(input_ids: torch.Tensor, _: torch.Tensor, width: int) -> torch.Tensor:
    """Placeholder for old log-probs while TRL scores a batch: NaN, shape (B, C), for which TRL's ratio is 1. Takes the
    arguments of TRL's method."""
    return torch.full((len(input_ids), width), torch.nan, device=input_ids.device)


class Passes:
    """The forward passes of one trainer, computed by `prompts`: with gradients for the current micro-batch and those
    that follow it in the same update.

    `most_tokens` limits a pass over several micro-batches; it defaults to `unasked_tokens` with `weights` and
    `is_light`. `correction` uses the training pass; `None` if TRL's own pass for old log-probs is needed. `in_order`:
    a group's completions stay together; otherwise TRL shuffles the generation batch.
    """

    def __init__(
        self, prompts: SharedPrompts, most_tokens: int | None, weights: int, *, is_light: bool = False,
        correction: CorrectionAtStep | None = None, in_order: bool = False,
    ) -> None:  # fmt: skip
        self.prompts, self.in_order = prompts, in_order
        self._most, self._weights, self._is_light = most_tokens, weights, is_light
        self._correction = correction
        self.has_prompt: list[bool] | None = None
        """For each completion of the latest micro-batch: False if its prompt was shared with another one's. `None` if
        TRL's own pass was used."""
        self.fitting = 0  # most tokens of a pass that recomputes no layer; 0: no such limit
        self._held: deque[_Held] = deque()
        self.forget()

    def forget(self) -> None:
        self._held.clear()
        self._batches: list[MicroBatch] = []
        self._left = 0
        if self._correction is not None:
            self._correction.forget()

    def begin(self, batches: Sequence[MicroBatch], update: int, *, is_last: bool) -> MicroBatch:
        """Begin a micro-batch, the first of `batches`, and return it; the others follow it, as far as known. `update`:
        micro-batches of this update; `is_last`: whether it is the last. A collective for the first one of an update,
        as `SharedPrompts.begin_update`."""
        if self._held and self._held[0].batch is not batches[0]:
            raise RuntimeError("another micro-batch arrived than the precomputed one, whose gradient would be lost")
        if not self._left:
            self.prompts.begin_update()
        self._left = 0 if is_last else (self._left or update) - 1
        self._batches = [*batches[: self._left + 1]]
        return batches[0]

    def log_probs(
        self, inputs: MicroBatch | None, upstream: Pass, *args: Any, sequences: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> LogProbs:  # fmt: skip
        """As `SharedPrompts.log_probs`. `inputs`: the micro-batch whose loss is being computed, if any. `sequences`:
        those of the rows, as in a micro-batch's column `SEQUENCES`."""
        sequences = sequences if inputs is None else inputs.get(SEQUENCES)
        in_training = inputs is not None and torch.is_grad_enabled()
        if sequences is not None:
            self.has_prompt = None
            passed = log_probs(partial(self.prompts.log_probs, upstream), sequences, *args, **kwargs)
        elif in_training:
            passed = self._log_probs(upstream, *args, **kwargs)
        else:
            return self.prompts.log_probs(upstream, *args, **kwargs)
        if inputs is None or not in_training:
            return passed
        if self._correction is not None:
            self._correction.apply(inputs, passed[0])
        return passed

    def _log_probs(
        self,
        upstream: Pass,
        model: nn.Module,
        *columns: Any,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **others: Any,
    ) -> LogProbs:
        if self._held:
            held = self._held.popleft()
            self.has_prompt = held.has_prompt
            return held.logps, held.entropies, None
        wanted = {"compute_entropy": compute_entropy, "compute_aux_loss": compute_aux_loss}
        # The router's loss is per micro-batch. With sharded weights, every rank makes one pass per micro-batch.
        alone = compute_aux_loss or len(self._batches) < 2 or self._most == 1
        own = Columns(*columns)
        batch = own if alone else Columns.of(self._batches)
        groups = self.prompts.groups(upstream, model, batch, others)
        self.has_prompt = None
        if groups is None:
            return upstream(model, *own, **wanted, **others)
        count = 1 if alone else self._together(groups, batch)
        size = len(own.ids)
        groups = [part for group in groups if (part := group.below(count * size)).rows]
        firsts = {group.rows[0] for group in groups}
        has_prompt = [row in firsts for row in range(count * size)]
        self.has_prompt = has_prompt[:size]
        if count == 1:
            return self.prompts.of(model, own, groups, **wanted)
        batch = Columns(batch.ids[: count * size], batch.mask[: count * size], batch.width)
        # A forward pass through DDP must prepare for the backward pass that reduces over ranks: the update's last.
        syncs = count == self._left + 1 and hasattr(model, "require_backward_grad_sync")
        with patched(model, "require_backward_grad_sync", True) if syncs else contextlib.nullcontext():
            logps, entropies, _ = self.prompts.of(model, batch, groups, compute_entropy=True)
        assert entropies is not None
        (first_logps, first_entropies), *rest = _divided(logps, entropies, size)
        for place, (own_logps, own_entropies) in enumerate(rest, start=1):
            own_prompts = has_prompt[place * size : (place + 1) * size]
            self._held.append(_Held(self._batches[place], own_logps, own_entropies, own_prompts))
        return first_logps, first_entropies, None

    def _together(self, groups: Sequence[Group], batch: Columns) -> int:
        """How many micro-batches share one forward pass: as few passes as possible, of about equal size."""
        count = len(self._batches)
        size = len(batch.ids) // count
        most = self._most
        if most is None:
            most = unasked_tokens(self._weights, size * batch.ids.size(1), self.fitting, is_light=self._is_light)
        fitting = (
            number
            for number in range(count, 1, -1)
            if sum(group.below(number * size).tokens for group in groups) <= most
        )
        return math.ceil(count / math.ceil(count / next(fitting, 1)))

    def leave_out_old(self, rollout: Rollout | None, is_reference: bool, are_weights_checked: bool) -> bool:
        """Whether the training forward pass provides a rollout's old log-probs. `are_weights_checked`: the check of
        vLLM's weights, which needs old log-probs, is done."""
        if rollout is None or is_reference or self._correction is None:
            return False
        rollout.is_corrected_at_step = rollout.is_trained_on and are_weights_checked
        return rollout.is_corrected_at_step

    def drain_correction(self, is_skipped: bool) -> dict[str, float]:
        """TRL's importance sampling metrics of a finished batch, by name; a collective. NaN for a skipped batch, whose
        tokens did not pass through the model."""
        if self._correction is None or not self._correction.is_due:
            return {}
        figures = self._correction.drain()
        return dict.fromkeys(figures, math.nan) if is_skipped else figures
