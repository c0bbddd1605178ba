"""The policy in training as the subject of quick evaluations: from TRL's output for a batch of rows to answers with
rewards, lengths and KL."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from salesrl_trl.kl.estimators import penalty
from salesrl_trl.kl.penalty import PenaltySettings
from salesrl_trl.types import Answered, Example, Reward

Tensors = Mapping[str, torch.Tensor]
"""TRL's output for a batch: `completion_mask` of shape (B, C), and log-probs of that shape where TRL computed them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredBatch:
    """A batch of B rows that was answered and scored, in their order."""

    output: Tensors
    completion_ids: Sequence[Sequence[int]]  # tokens of each answer, with the one that ends it
    rewards: Sequence[Reward]


@dataclass(frozen=True, kw_only=True, slots=True)
class GreedySubject:
    """`evaluation.subject.Subject` over the trainer's callables."""

    set_aside: Callable[[], AbstractContextManager[None]]
    """While active: evaluation mode, one greedy answer a prompt, and all other figures stay as they are."""
    score: Callable[[Sequence[list[Example]]], Iterator[ScoredBatch]]
    """Answers and scores batches, in their order. It may answer later ones first."""
    logps_of: Callable[[Tensors], torch.Tensor]
    """Log-probs of a batch's answers under the policy, shape (B, C). Called where TRL has not computed them."""
    decode: Callable[[Sequence[Sequence[int]]], list[str]]
    branch_of: Callable[[Example], str]
    ends: frozenset[int]
    batch_size: int
    kl: PenaltySettings
    betas: Callable[[], Mapping[str, float]]
    save: Callable[[Path], None]
    log: Callable[[Mapping[str, float | None]], None]

    def answer(self, rows: Sequence[Example]) -> list[Answered]:
        batches = [list(rows[first : first + self.batch_size]) for first in range(0, len(rows), self.batch_size)]
        with self.set_aside():
            every = zip(batches, self.score(batches), strict=True)
            return [answered for batch, scored in every for answered in self._answered(batch, scored)]

    def _answered(self, rows: Sequence[Example], batch: ScoredBatch) -> list[Answered]:
        texts = self.decode(batch.completion_ids)
        kls = self._kl(batch.output)
        return [
            Answered(
                branch=self.branch_of(row),
                text=text,
                columns={name: value for name, value in row.items() if name not in ("prompt", "images")},
                reward=reward,
                tokens=len(ids),
                truncated=not ids or ids[-1] not in self.ends,
                kl=kl,
                kl_tokens=tokens,
            )
            for row, text, reward, ids, (kl, tokens) in zip(
                rows, texts, batch.rewards, batch.completion_ids, kls, strict=True
            )
        ]

    def _kl(self, output: Tensors) -> list[tuple[float | None, int]]:
        """Sum of the KL and its number of tokens, by answer; `None` and 0 without a reference policy."""
        mask = output["completion_mask"].bool()  # (B, C)
        reference, logps = output.get("ref_per_token_logps"), output.get("old_per_token_logps")
        if reference is None:
            return [(None, 0)] * len(mask)
        if logps is None:
            logps = self.logps_of(output)
        log_ratio = torch.where(mask, (reference - logps).double(), 0.0)  # (B, C)
        kl = penalty(log_ratio, None, self.kl.estimator, self.kl.clamp)
        sums = torch.where(mask, kl, 0.0).sum(dim=1)  # (B,)
        return list(zip(sums.tolist(), mask.sum(dim=1).tolist(), strict=True))
