"""The policy in training as the subject of quick evaluations: from TRL's output for a batch of rows to answers with
rewards, lengths and KL."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from salesrl_trl.kl.penalty import penalty
from salesrl_trl.types import Answered, Example, Reward
from salesrl_trl.wiring.part import PartContext

Tensors = Mapping[str, torch.Tensor]
"""TRL's output for a batch: `completion_mask` of shape (B, C), and log-probs of that shape where TRL computed them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredBatch:
    """A batch of B rows that was answered and scored, in their order."""

    output: Tensors
    completion_ids: Sequence[Sequence[int]]  # tokens of each answer, with the one that ends it
    rewards: Sequence[Reward]


class GreedySubject:
    """`subject.Subject` over a run."""

    def __init__(self, run: PartContext) -> None:
        self._run, trl = run, run.trl
        self._ends = frozenset({*trl.eos_token_ids, trl.tokenizer.pad_token_id})
        self._penalty = run.args.kl_penalty()

    def betas(self) -> Mapping[str, float]:
        kl = self._run.kl
        return {} if kl is None else dict(zip(self._run.args.branches, kl.control.betas, strict=True))

    def save(self, folder: Path) -> None:
        self._run.trl.save(folder)

    def log(self, figures: Mapping[str, float | None]) -> None:
        self._run.trl.log(figures)

    @contextlib.contextmanager
    def _set_aside(self) -> Iterator[None]:
        """While active: evaluation mode, one greedy answer a prompt, and all other figures stay as they are."""
        with self._run.trl.set_aside(), self._run.sampler.greedily(), self._run.ledger.aside("eval"):
            yield

    def _score(self, batches: Sequence[list[Example]]) -> "Iterator[ScoredBatch]":
        """Answers and scores batches, in their order. Later ones may be answered first."""
        run, step = self._run, self._run.trl.step()
        for rows in run.pipeline.evaluations(batches, step):
            rollout, output = run.scoring.evaluate(rows, step)
            assert rollout.sampled is not None and rollout.result is not None
            ids, rewards = rollout.sampled.completion_ids, rollout.result.rewards
            yield ScoredBatch(output=output, completion_ids=ids, rewards=rewards)

    def answer(self, rows: Sequence[Example]) -> list[Answered]:
        size = self._run.args.per_device_eval_batch_size
        batches = [list(rows[first : first + size]) for first in range(0, len(rows), size)]
        with self._set_aside():
            every = zip(batches, self._score(batches), strict=True)
            return [answered for batch, scored in every for answered in self._answered(batch, scored)]

    def _answered(self, rows: Sequence[Example], batch: ScoredBatch) -> list[Answered]:
        texts = self._run.trl.tokenizer.batch_decode(batch.completion_ids, skip_special_tokens=True)
        kls = self._kl(batch.output)
        return [
            Answered(
                branch=self._run.branches.of(row),
                text=text,
                columns={name: value for name, value in row.items() if name not in ("prompt", "images")},
                reward=reward,
                tokens=len(ids),
                truncated=not ids or ids[-1] not in self._ends,
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
            logps = self._run.trl.logps_of(output)
        log_ratio = torch.where(mask, (reference - logps).double(), 0.0)  # (B, C)
        kl = penalty(log_ratio, None, self._penalty.estimator, self._penalty.clamp)
        sums = torch.where(mask, kl, 0.0).sum(dim=1)  # (B,)
        return list(zip(sums.tolist(), mask.sum(dim=1).tolist(), strict=True))
