"""One pass for several micro-batches of an update. The trainer calls `Ahead` through `rollout.model_passes`.

Each micro-batch has its own loss and its own `backward`, as in TRL. Those of all but the last one end at the
log-probs, where their gradients wait. The last one goes on through the model with all of them. The weights do not move
inside an update, so the gradient is the sum that TRL accumulates.
"""

import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from salesrl_trl.ground.patched import patched
from salesrl_trl.shared_prompts.row_layout import Group
from salesrl_trl.shared_prompts.shared_passes import MOST_TOKENS, Columns, LogProbs, SharedPrompts

MicroBatch = Mapping[str, Any]
FILLING = 30_000_000_000_000
"""Tokens times weights of a pass that fills a large GPU: 4,000 tokens with 7B, 60,000 with 0.5B. Larger ones were at
most an eighth faster on an H200 (`benchmarks.passes`), as much with two and four times the tokens."""


def unasked_tokens(weights: int, padded: int, *, is_light: bool) -> int:
    """Tokens of a pass where the settings name none: as many as fill a GPU, and no more than TRL's own pass for one
    micro-batch, `padded`. `is_light`: a token takes little memory (16 bits on a GPU, with gradient checkpointing).
    Then a pass may have as many as TRL's, up to four times those that fill a GPU. Where TRL's has fewer, it may have
    as many as fill one, up to `MOST_TOKENS`; with 0.5B that is about a GiB."""
    filling = FILLING // max(weights, 1)
    return max(min(filling, MOST_TOKENS), min(4 * filling, padded)) if is_light else min(filling, padded)


class _Joined(torch.autograd.Function):
    """Log-probs and entropies of the last micro-batch: `apply(logps, entropies, waiting, *others)`. In its backward
    pass those of the others get the gradients that wait."""

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


class Ahead:
    """Passes with gradients, for the micro-batch under way and for those that follow it in the same update.
    `most_tokens` limits a pass for several micro-batches; without it `unasked_tokens` does, with `weights` and
    `is_light`."""

    def __init__(
        self, prompts: SharedPrompts, most_tokens: int | None, weights: int, *, is_light: bool = False
    ) -> None:
        self._prompts = prompts
        self._most = most_tokens
        self._unasked = functools.partial(unasked_tokens, weights, is_light=is_light)
        self.has_prompt: list[bool] | None = None
        """By completion of the latest micro-batch: False if its prompt went through the model with another one. `None`
        for TRL's way."""
        self._held: deque[_Held] = deque()
        self.forget()

    def forget(self) -> None:
        self._held.clear()
        self._batches: list[MicroBatch] = []
        self._left = 0

    def begin(self, batches: Sequence[MicroBatch], update: int, *, is_last: bool) -> None:
        """Begin a micro-batch, the first of `batches`; the others come after it, as far as they are known. `update`:
        micro-batches of this update; `is_last`: it is its last. The first one of an update is a collective, as
        `SharedPrompts.begin_update`."""
        if self._held and self._held[0].batch is not batches[0]:
            raise RuntimeError("another micro-batch came than the one whose pass was made: its gradient would be lost")
        if not self._left:
            self._prompts.begin_update()
        self._left = 0 if is_last else (self._left or update) - 1
        self._batches = [*batches[: self._left + 1]]

    def log_probs(
        self,
        upstream: Callable[..., LogProbs],
        model: nn.Module,
        *columns: Any,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **others: Any,
    ) -> LogProbs:
        """As TRL's method, which is `upstream`, for the micro-batch that was begun. `columns` are those of
        `Columns`."""
        if self._held:
            held = self._held.popleft()
            self.has_prompt = held.has_prompt
            return held.logps, held.entropies, None
        wanted = {"compute_entropy": compute_entropy, "compute_aux_loss": compute_aux_loss}
        # The router's loss is one of a micro-batch. With sharded weights every rank makes one pass for each.
        alone = compute_aux_loss or len(self._batches) < 2 or self._most == 1
        own = Columns(*columns)
        batch = own if alone else Columns.of(self._batches)
        groups = self._prompts.groups(upstream, model, batch, others)
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
            return self._prompts.of(model, own, groups, **wanted)
        batch = Columns(batch.ids[: count * size], batch.mask[: count * size], batch.width)
        # A pass through DDP prepares for the backward pass that sums over ranks: the update's last one.
        syncs = count == self._left + 1 and hasattr(model, "require_backward_grad_sync")
        with patched(model, "require_backward_grad_sync", True) if syncs else contextlib.nullcontext():
            logps, entropies, _ = self._prompts.of(model, batch, groups, compute_entropy=True)
        assert entropies is not None
        (first_logps, first_entropies), *rest = _divided(logps, entropies, size)
        for place, (own_logps, own_entropies) in enumerate(rest, start=1):
            own_prompts = has_prompt[place * size : (place + 1) * size]
            self._held.append(_Held(self._batches[place], own_logps, own_entropies, own_prompts))
        return first_logps, first_entropies, None

    def _together(self, groups: Sequence[Group], batch: Columns) -> int:
        """How many of the micro-batches go into one pass: as few passes as they fit into, of about the same size."""
        count = len(self._batches)
        size = len(batch.ids) // count
        most = self._unasked(size * batch.ids.size(1)) if self._most is None else self._most
        fitting = (
            number
            for number in range(count, 1, -1)
            if sum(group.below(number * size).tokens for group in groups) <= most
        )
        return math.ceil(count / math.ceil(count / next(fitting, 1)))


def _divided(logps: torch.Tensor, entropies: torch.Tensor, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probs and entropies of each micro-batch of `size` completions. The backward pass of the last one takes the
    gradients of all with it."""
    *firsts, last = zip(torch.split(logps, size), torch.split(entropies, size), strict=True)
    waiting = [tensor.detach().requires_grad_() for pair in firsts for tensor in pair]
    joined = _Joined.apply(*last, waiting, *(tensor for pair in firsts for tensor in pair))  # type: ignore[no-untyped-call]
    return [*zip(waiting[::2], waiting[1::2], strict=True), joined]
