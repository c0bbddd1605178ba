"""Metrics of the next log line, for training and evaluations: sums, and failures by reason. Already aggregated over
ranks, so nothing here is a collective."""

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from salesrl_trl.kl.branched import KLControl
from salesrl_trl.names import ALL_KL, FAILURE_REASONS, POSITION_GAP, beta_of, kl_of, line_names
from salesrl_trl.reward.figures import FIRST, SECOND, VALUE, RewardFigures
from salesrl_trl.telemetry.perf import StepAggregates
from salesrl_trl.types import EvaluatedCompletion

MODES = ("train", "eval")


def kl_names(branches: Sequence[str]) -> tuple[str, ...]:
    """The names of KL metrics. `ALL_KL` replaces TRL's own, which a single outlier token makes infinite."""
    return line_names({"kl"}, {"branch": branches})


class _ModeFigures:
    def __init__(self, names: Sequence[str]) -> None:
        self.sums = StepAggregates((*names, FIRST, SECOND))
        self.failures: Counter[str] = Counter()
        self.batches = 0  # generation batches
        self.rewards: list[float] = []  # by completion; evaluations only
        self.written: list[EvaluatedCompletion] = []


class Ledger:
    """Accumulates metrics between two log lines, equal on all ranks. `with_kl`: the loss has a KL penalty. `further`:
    other parts of the line. `own`: names of the user's own parts."""

    def __init__(
        self, rewards: RewardFigures, *, with_kl: bool = False, further: Sequence[str] = (), own: Sequence[str] = ()
    ) -> None:
        self._rewards = rewards
        self.names = (*rewards.names(further), *(kl_names(rewards.branches) if with_kl else ()), *own)
        self._modes = {mode: _ModeFigures(self.names) for mode in MODES}
        self._reasons: set[str] = set()  # all reasons of training so far

    def add(self, mode: str, name: str, total: float, count: float = 1) -> None:
        self._modes[mode].sums.add(name, total, count)

    def record_rewards(
        self, mode: str, table: torch.Tensor, reports: torch.Tensor, reasons: Iterable[str] = ()
    ) -> None:
        """Add a batch's rewards: all ranks' tables of `RewardFigures`, and why completions failed."""
        figures = self._modes[mode]
        self._rewards.add_rewards(figures.sums, table)
        self._rewards.add_report(figures.sums, reports)
        figures.failures.update(reasons)
        figures.batches += 1
        if mode == "eval":
            figures.rewards += self._rewards.column(table, VALUE).tolist()

    def record_kl(
        self, mode: str, totals: Sequence[Sequence[float]], betas: Sequence[float], shares: Sequence[float],
        control: KLControl,
    ) -> None:  # fmt: skip
        """Add an optimizer step's KL. `totals`: over all ranks, by branch id, then by `kl.penalty.SUMS`. `betas`:
        coefficients in this step's loss; `shares`: weights of the branches' rewards in it; both by branch id.
        `control`: has the bands, and the shares of steps in them."""
        add = self._modes[mode].sums.add
        for branch, beta, share, (kl, penalty, clamped, tokens, weight) in zip(
            control.branches, betas, shares, totals, strict=True
        ):
            name, target = branch.branch, branch.target
            add(beta_of(name), beta, 1)
            add(kl_of(name, "_tokens"), tokens, 1)
            add(kl_of(name, "_update_share"), share, 1)
            add(ALL_KL, penalty, weight)
            for kind, total, count in (("", kl, weight), ("_penalty", penalty, weight), ("_clamped", clamped, tokens)):
                add(kl_of(name, kind), total, count)
            if target.has_band and weight and math.isfinite(kl):
                # Without a KL, log no edges either: TensorBoard draws a band over steps common to all lines.
                for kind, nats in (("_low", target.low), ("_high", target.high)):
                    add(kl_of(name, kind), nats or 0.0, 1)
                add(kl_of(name, "_in_band"), float(target.contains(kl / weight)), 1)
            if not math.isnan(branch.share_in_band):
                add(kl_of(name, "_share_in_band"), branch.share_in_band, 1)

    @property
    def written(self) -> list[EvaluatedCompletion]:
        """This rank's evaluated completions since the last `drain_evaluated`."""
        return self._modes["eval"].written

    def drain_evaluated(self) -> tuple[list[float], list[EvaluatedCompletion]]:
        """The rewards of completions evaluated since the last call, in order, NaN if unscored; and what was
        `written`."""
        figures = self._modes["eval"]
        rewards, written, figures.rewards, figures.written = figures.rewards, figures.written, [], []
        return rewards, written

    def flush(self, mode: str) -> dict[str, float]:
        """The metrics of a mode's log line: always the same names, NaN if nothing was recorded. Resets them."""
        figures = self._modes[mode].sums.flush()
        figures[POSITION_GAP] = figures.pop(FIRST) - figures.pop(SECOND)
        return {name: value for name, value in figures.items() if name not in self._rewards.not_logged}

    def failures(self, mode: str) -> Counter[str]:
        """Failed completions by reason code since the mode's last log line."""
        return self._modes[mode].failures

    def batches(self, mode: str) -> int:
        """Generation batches since the mode's last log line."""
        return self._modes[mode].batches

    def drain_failures(self, mode: str) -> dict[str, int]:
        """Reset a mode's failures and batches. Returns training's failures by tag, 0 for reasons seen earlier."""
        counts, self._modes[mode].failures = self._modes[mode].failures, Counter()
        self._modes[mode].batches = 0
        if mode != "train":
            return {}
        self._reasons |= counts.keys()
        return {f"{FAILURE_REASONS}{reason}": counts[reason] for reason in sorted(self._reasons)}

    def clear(self) -> None:
        """Reset all metrics and failures. `drain_failures` still lists earlier reasons."""
        for mode in MODES:
            self._modes[mode] = _ModeFigures(self.names)

    @contextlib.contextmanager
    def aside(self, mode: str) -> Iterator[None]:
        """Inside the block a mode starts without metrics and failures; afterwards the earlier ones are restored."""
        figures, self._modes[mode] = self._modes[mode], _ModeFigures(self.names)
        try:
            yield
        finally:
            self._modes[mode] = figures
