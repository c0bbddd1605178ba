"""The figures of the next log line, for training and for evaluations.

Owns their sums, the failures by reason, and how the figures of a mode are set aside and brought back. It takes figures
that are already the same on all ranks. It owns no collective, and knows neither trainer nor model. `rollout.scoring`,
`rollout.passes` and `wiring.components` record; the trainer's `log` flushes.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from salesrl_trl.evaluation.held_out import EvaluatedCompletion
from salesrl_trl.kl.controller import KLControl
from salesrl_trl.kl.kl_figures import add_kl, kl_names
from salesrl_trl.names import (
    BOUNDED,
    FAILURE_REASONS,
    LEFT_OUT,
)
from salesrl_trl.reward.figures import VALUE, JudgeBias, RewardFigures
from salesrl_trl.telemetry.aggregates import StepAggregates

MODES = ("train", "eval")


class _ModeFigures:
    """What was recorded of one mode since its last line."""

    def __init__(self, names: Sequence[str]) -> None:
        self.sums = StepAggregates(names)
        self.bias = JudgeBias()
        self.failures: Counter[str] = Counter()
        self.rewards: list[float] = []  # by completion; of evaluations only
        self.written: list[EvaluatedCompletion] = []


class Ledger:
    """Records figures between two log lines. All ranks record the same figures.

    `with_kl`: the loss has a KL penalty. `with_baseline`: baselines include the reference's reward.
    """

    def __init__(self, rewards: RewardFigures, *, with_kl: bool = False, with_baseline: bool = False) -> None:
        self._rewards = rewards
        self.names = (*rewards.names(with_baseline), *(kl_names(rewards.branches) if with_kl else ()))
        self._modes = {mode: _ModeFigures(self.names) for mode in MODES}
        self._reasons: set[str] = set()  # all reasons of training so far

    def add(self, mode: str, name: str, total: float, count: float = 1) -> None:
        """Add a sum over `count` items to a figure of the line."""
        self._modes[mode].sums.add(name, total, count)

    def record_rewards(
        self, mode: str, table: torch.Tensor, reports: torch.Tensor, reasons: Iterable[str] = ()
    ) -> None:
        """Add the rewards of a batch: the tables of `RewardFigures.encode` and `encode_report` of all ranks, and the
        reason code of each completion that failed."""
        figures = self._modes[mode]
        self._rewards.add_rewards(figures.sums, table)
        self._rewards.add_report(figures.sums, figures.bias, reports)
        figures.failures.update(reasons)
        if mode == "eval":
            figures.rewards += self._rewards.column(table, VALUE).tolist()

    def record_correction(self, mode: str, left_out: float, bounded: float, count: float) -> None:
        """Count the items that the correction for the sampler's distribution left out and bounded."""
        self.add(mode, LEFT_OUT, left_out, count)
        self.add(mode, BOUNDED, bounded, count)

    def record_kl(
        self,
        mode: str,
        totals: Sequence[Sequence[float]],
        betas: Sequence[float],
        shares: Sequence[float],
        control: KLControl,
    ) -> None:
        """Add one optimizer step's KL, as `kl.kl_figures.add_kl` takes it."""
        add_kl(self._modes[mode].sums, totals, betas, shares, control)

    def record_written(self, mode: str, written: Iterable[EvaluatedCompletion]) -> None:
        """Keep what the policy wrote in an evaluation on this rank."""
        self._modes[mode].written += written

    def drain_written(self) -> list[EvaluatedCompletion]:
        """What the policy wrote in evaluations on this rank since the last call."""
        figures = self._modes["eval"]
        written, figures.written = figures.written, []
        return written

    def drain_eval_rewards(self) -> list[float]:
        """The rewards of evaluated completions since the last call, in their order; NaN without a reward."""
        figures = self._modes["eval"]
        rewards, figures.rewards = figures.rewards, []
        return rewards

    def flush(self, mode: str) -> dict[str, float]:
        """The figures of a mode's line: always the same names, NaN if nothing was recorded. Starts over."""
        return {**self._modes[mode].sums.flush(), **self._modes[mode].bias.flush()}

    def failures(self, mode: str) -> Counter[str]:
        """Number of failed completions by reason code, since the last line of a mode."""
        return self._modes[mode].failures

    def drain_failures(self, mode: str) -> dict[str, int]:
        """Forget a mode's failures. Returns those of training by tag, with 0 for reasons that came only before; none
        of an evaluation, whose own line shows them."""
        counts, self._modes[mode].failures = self._modes[mode].failures, Counter()
        if mode != "train":
            return {}
        self._reasons |= counts.keys()
        return {f"{FAILURE_REASONS}{reason}": counts[reason] for reason in sorted(self._reasons)}

    def clear(self) -> None:
        """Forget all figures and failures. `drain_failures` still lists the reasons so far."""
        for mode in MODES:
            self._modes[mode] = _ModeFigures(self.names)

    @contextlib.contextmanager
    def aside(self, mode: str) -> Iterator[None]:
        """Inside the block a mode has no figures and failures. After it, the earlier ones are back."""
        figures, self._modes[mode] = self._modes[mode], _ModeFigures(self.names)
        try:
            yield
        finally:
            self._modes[mode] = figures
