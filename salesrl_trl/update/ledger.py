"""The figures of the next log line, for training and for evaluations.

Owns their names and order, the failures by reason, and how the figures of a mode are set aside and brought back. It
takes figures that are already the same on all ranks: it owns no collective, and knows neither trainer nor model.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from salesrl_trl.evaluation.held_out import EvaluatedCompletion
from salesrl_trl.kl.controller import KLControl
from salesrl_trl.kl.kl_figures import add_kl, kl_names
from salesrl_trl.names import (
    BASELINE_FALLBACK,
    BOUNDED,
    FAILURE_REASONS,
    LEFT_OUT,
    SINGLE_SCORED,
    SKIPPED_UPDATE,
    STALENESS,
    STALENESS_MAX,
)
from salesrl_trl.reward.figures import add_report, add_rewards, report_names, reward_names, time_names, values_of
from salesrl_trl.reward.judge.bias import JudgeBias
from salesrl_trl.telemetry.aggregates import StepAggregates

MODES = ("train", "eval")
UPDATE_NAMES = (SKIPPED_UPDATE, SINGLE_SCORED, STALENESS, STALENESS_MAX, LEFT_OUT, BOUNDED)


class _Page:
    """The figures of one mode."""

    def __init__(self, names: Sequence[str]) -> None:
        self.figures = StepAggregates(names)
        self.bias = JudgeBias()
        self.failures: Counter[str] = Counter()
        self.rewards: list[float] = []  # by completion; of evaluations only
        self.written: list[EvaluatedCompletion] = []

    def flush(self) -> dict[str, float]:
        return {**self.figures.flush(), **self.bias.flush()}


class Ledger:
    """Records figures between two log lines. All ranks record the same figures.

    Args:
        branches (`Sequence[str]`):
            Branch names by id.
        providers (`Sequence[str]`, *optional*):
            Judge providers.
        services (`Sequence[str]`, *optional*):
            Services with figures of their traffic.
        stages (`Sequence[str]`, *optional*):
            Stages of the reward beside the package's own.
        with_kl (`bool`, *optional*, defaults to `False`):
            Whether the loss has a KL penalty.
        with_baseline (`bool`, *optional*, defaults to `False`):
            Whether baselines include the reference's reward.
    """

    def __init__(
        self,
        branches: Sequence[str],
        providers: Sequence[str] = (),
        services: Sequence[str] = (),
        stages: Sequence[str] = (),
        *,
        with_kl: bool = False,
        with_baseline: bool = False,
    ) -> None:
        self._branches = branches
        self._stages = stages
        self._report_names = report_names(providers, services)
        self._names = (
            *reward_names(branches),
            *UPDATE_NAMES,
            *time_names(stages),
            *self._report_names,
            *(kl_names(branches) if with_kl else ()),
            *((BASELINE_FALLBACK,) if with_baseline else ()),
        )
        self._pages = {mode: _Page(self._names) for mode in MODES}
        self._reasons: set[str] = set()  # all reasons of training so far

    def failures(self, mode: str) -> Counter[str]:
        """Number of failed completions by reason code, since the last line of a mode."""
        return self._pages[mode].failures

    def record_rewards(self, mode: str, table: torch.Tensor, reasons: Iterable[str]) -> None:
        """Add the rewards of a batch.

        Args:
            mode (`str`):
                `"train"` or `"eval"`.
            table (`torch.Tensor`):
                From `reward.figures.encode`, of all ranks.
            reasons (`Iterable[str]`):
                Reason code of each completion that failed, of all ranks.
        """
        add_rewards(self._pages[mode].figures, table, self._branches, self._stages)
        self._pages[mode].failures.update(reasons)
        if mode == "eval":
            self._pages[mode].rewards += values_of(table)

    def drain_eval_rewards(self) -> list[float]:
        """The rewards of evaluated completions since the last call, in their order; NaN without a reward."""
        page = self._pages["eval"]
        rewards, page.rewards = page.rewards, []
        return rewards

    def record_written(self, mode: str, written: Iterable[EvaluatedCompletion]) -> None:
        """Keep what the policy wrote in an evaluation on this rank."""
        self._pages[mode].written += written

    def drain_written(self) -> list[EvaluatedCompletion]:
        """What the policy wrote in evaluations on this rank since the last call."""
        page = self._pages["eval"]
        written, page.written = page.written, []
        return written

    def record_report(self, mode: str, table: torch.Tensor) -> None:
        """Add the reports of a batch: the table of `reward.figures.encode_report`, of all ranks."""
        page = self._pages[mode]
        add_report(page.figures, page.bias, table, self._report_names)

    def record_groups(self, is_scored: torch.Tensor, size: int) -> None:
        """Count the groups of a training batch with one scored completion only.

        Args:
            is_scored (`torch.Tensor`):
                Of each completion of all ranks, shape (N,), bool.
            size (`int`):
                Completions in a group.
        """
        alone = is_scored.view(-1, size).sum(dim=1) == 1  # (groups,)
        self._pages["train"].figures.add(SINGLE_SCORED, alone.sum().item(), len(alone))

    def record_update(self, mode: str, *, is_skipped: bool) -> None:
        """Count a batch, and whether its update is skipped."""
        self._pages[mode].figures.add(SKIPPED_UPDATE, float(is_skipped), 1)

    def record_staleness(self, mode: str, steps: int) -> None:
        """Add the optimizer steps between the weights that sampled a batch and those that train on it."""
        for name in (STALENESS, STALENESS_MAX):
            self._pages[mode].figures.add(name, steps, 1)

    def record_correction(self, mode: str, left_out: float, bounded: float, count: float) -> None:
        """Count the items that the correction for the sampler's distribution left out and bounded."""
        for name, total in ((LEFT_OUT, left_out), (BOUNDED, bounded)):
            self._pages[mode].figures.add(name, total, count)

    def record_baselines(self, is_missing: torch.Tensor) -> None:
        """Count the groups of a training batch without a reference's reward in their baseline: shape (groups,)."""
        self._pages["train"].figures.add(BASELINE_FALLBACK, is_missing.sum().item(), len(is_missing))

    def record_kl(
        self,
        mode: str,
        totals: Sequence[Sequence[float]],
        betas: Sequence[float],
        shares: Sequence[float],
        control: KLControl,
    ) -> None:
        """Add one optimizer step's KL, as `kl.kl_figures.add_kl` takes it."""
        add_kl(self._pages[mode].figures, totals, betas, shares, control)

    def flush(self, mode: str) -> dict[str, float]:
        """The figures of a mode's line: always the same names, NaN if nothing was recorded. Starts over."""
        return self._pages[mode].flush()

    def drain_failures(self, mode: str) -> dict[str, int]:
        """Forget a mode's failures.

        Returns:
            `dict[str, int]`: for training, the number of failures since the last line by tag, with 0 for reasons that
            came only before. Empty for an evaluation, whose own line shows them.
        """
        counts, self._pages[mode].failures = self._pages[mode].failures, Counter()
        if mode != "train":
            return {}
        self._reasons |= counts.keys()
        return {f"{FAILURE_REASONS}{reason}": counts[reason] for reason in sorted(self._reasons)}

    def clear(self) -> None:
        """Forget all figures and failures. `drain_failures` still lists the reasons so far."""
        for mode in MODES:
            self._pages[mode] = _Page(self._names)

    @contextlib.contextmanager
    def aside(self, mode: str) -> Iterator[None]:
        """Inside the block a mode has no figures and failures. After it, the earlier ones are back."""
        page, self._pages[mode] = self._pages[mode], _Page(self._names)
        try:
            yield
        finally:
            self._pages[mode] = page
