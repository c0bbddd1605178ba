"""The figures of the next log line, for training and for evaluations: sums, and failures by reason. They are already
the same on all ranks: there is no collective here."""

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
    """The names of a KL's figures. `ALL_KL` replaces TRL's own figure, which one token far off makes infinite."""
    return line_names({"kl"}, {"branch": branches})


class _ModeFigures:
    def __init__(self, names: Sequence[str]) -> None:
        self.sums = StepAggregates((*names, FIRST, SECOND))
        self.failures: Counter[str] = Counter()
        self.batches = 0  # generation batches
        self.rewards: list[float] = []  # by completion; of evaluations only
        self.written: list[EvaluatedCompletion] = []


class Ledger:
    """Records figures between two log lines, the same on all ranks. `with_kl`: the loss has a KL penalty.
    `further`: other parts of its line. `own`: names of a user's own parts."""

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
        """Add the rewards of a batch: the tables of `RewardFigures` of all ranks, and why completions failed."""
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
        """Add one optimizer step's KL. `totals` are over all ranks, by branch id, then by `kl.penalty.SUMS`. `betas`
        are the coefficients in the loss of this step, and `shares` say by how much the branches' rewards counted in
        it, both by branch id. `control` has the bands, and the shares of steps in them."""
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
                # A step without a KL has no edges either: TensorBoard draws a band over steps that all lines share.
                for kind, nats in (("_low", target.low), ("_high", target.high)):
                    add(kl_of(name, kind), nats or 0.0, 1)
                add(kl_of(name, "_in_band"), float(target.contains(kl / weight)), 1)
            if not math.isnan(branch.share_in_band):
                add(kl_of(name, "_share_in_band"), branch.share_in_band, 1)

    @property
    def written(self) -> list[EvaluatedCompletion]:
        """What the policy wrote in evaluations on this rank since the last `drain_evaluated`."""
        return self._modes["eval"].written

    def drain_evaluated(self) -> tuple[list[float], list[EvaluatedCompletion]]:
        """The rewards of completions that were evaluated since the last call, in their order, NaN without one; and
        what was `written`."""
        figures = self._modes["eval"]
        rewards, written, figures.rewards, figures.written = figures.rewards, figures.written, [], []
        return rewards, written

    def flush(self, mode: str) -> dict[str, float]:
        """The figures of a mode's line: always the same names, NaN if nothing was recorded. Starts over."""
        figures = self._modes[mode].sums.flush()
        figures[POSITION_GAP] = figures.pop(FIRST) - figures.pop(SECOND)
        return {name: value for name, value in figures.items() if name not in self._rewards.not_logged}

    def failures(self, mode: str) -> Counter[str]:
        """Number of failed completions by reason code, since the last line of a mode."""
        return self._modes[mode].failures

    def batches(self, mode: str) -> int:
        """Number of generation batches, since the last line of a mode."""
        return self._modes[mode].batches

    def drain_failures(self, mode: str) -> dict[str, int]:
        """Forget a mode's failures and batches. Returns the failures of training by tag, 0 for those of before."""
        counts, self._modes[mode].failures = self._modes[mode].failures, Counter()
        self._modes[mode].batches = 0
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
