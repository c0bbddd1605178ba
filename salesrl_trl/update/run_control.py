"""Whether a generation batch counts, and whether the run continues or with which error it ends. Also decisions made by
all ranks together."""

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

import torch
from accelerate import PartialState
from accelerate.utils import gather

from salesrl_trl.errors import BudgetSpent, DivergedError, RunStopped, SalesRLError, TooFewRewardsError
from salesrl_trl.names import ALL_KL, CHECKPOINT_FOLDERS

GRADIENT_NORM = "grad_norm"  # transformers' metric, before clipping; it does not log non-finite losses
MAX_KL = 1000.0  # in nats per token. Above it a run has diverged; usual bands end below 1
BROKEN_LINES = 3  # consecutive diverged log lines that end a run; a single one may be an odd batch
SKIPPED_AT_END = 2
"""Consecutive skipped batches that fail a run at its last step, when no later batch can show that services
recovered."""

MAX_OUTAGE_S = 3600.0  # `max_outage_s` in training


def on_any_rank(condition: bool, device: torch.device) -> bool:
    """A collective."""
    return bool(highest(condition, device))


def highest(number: int, device: torch.device) -> int:
    """The maximum over all ranks; a collective."""
    if PartialState().num_processes == 1:
        return number
    return int(gather(torch.tensor([number], device=device)).max())


class SpendingAccount(Protocol):
    """A run's spending account."""

    def in_words(self) -> str: ...

    def reported(self) -> str:
        """With the exhausted limits."""

    def is_reached(self) -> bool:
        """Whether a limit is exhausted."""


@dataclass(eq=False, kw_only=True)
class RunControl:
    """Decides for one run, and after `restart` for the next. `SalesGRPOConfig` documents the fields."""

    min_valid_reward_fraction: float
    max_skipped_generations: int  # at the last step, `SKIPPED_AT_END` suffice
    max_outage_s: float = math.inf
    output_dir: str = ""

    def __post_init__(self) -> None:
        self.spending: SpendingAccount | None = None  # for a run with a budget
        self.restart()

    def restart(self) -> None:
        self.requested: str | None = None  # the signal or caller that requested a stop of this rank
        self.error: SalesRLError | None = None  # ends the run after the current step
        self.is_skipping = False  # the current generation batch is excluded from the loss
        self.is_spent = False  # whether `is_refused_by_budget` was true on any rank, in training or evaluation
        self._moves = False
        self._skipped_in_a_row = 0
        self._skips_since = 0.0
        self._is_out_too_long = False
        self._missing: Counter[str] = Counter()
        self._broken_in_a_row = 0

    def record_batch(self, scored_fraction: float, missing: Counter[str]) -> str | None:
        """Skip a batch with too few scored completions. `missing`: number of unscored ones by reason code. Returns a
        warning, or `None` if the batch counts."""
        wanted = self.min_valid_reward_fraction
        self.is_skipping = scored_fraction < wanted
        if not self.is_skipping:
            self._skipped_in_a_row = 0
            return None
        if not self._skipped_in_a_row:
            self._skips_since = time.monotonic()
        self._skipped_in_a_row += 1
        self._missing = missing
        return (
            f"skipping an update: {scored_fraction:.0%} of the completions could be scored, wanted {wanted:.0%} "
            f"({_counted(missing)})"
        )

    def is_refused_by_budget(self, reasons: Iterable[str]) -> bool:
        """Whether the budget left completions of this rank unscored. Also checks the account, as functions and
        replayed records may use the same reason code."""
        return BudgetSpent.default_code in reasons and self.spending is not None and self.spending.is_reached()

    def urgency(self) -> int:
        """This rank's reason to end the run: 2 if asked to stop, 1 if batches have been skipped for too long."""
        is_long = self._skipped_in_a_row > 0 and time.monotonic() - self._skips_since >= self.max_outage_s
        return 2 if self.requested is not None else int(is_long)

    def record_urgency(self, urgency: int) -> None:
        """Record the maximum `urgency` over all ranks."""
        if urgency == 2 and self.requested is None:
            self.requested = "a request to another rank"
        self._is_out_too_long = urgency == 1 and self._skipped_in_a_row > 0

    def end_step(self, step: int, *, is_last: bool) -> None:
        """End the run after this optimizer step if too many batches in a row were skipped, or for too long. `is_last`:
        it is the last step."""
        most = self.max_skipped_generations
        is_over = self._skipped_in_a_row >= (min(most, SKIPPED_AT_END) if is_last else most) or self._is_out_too_long
        if self.error is not None or not is_over:
            return
        began = datetime.now() - timedelta(seconds=time.monotonic() - self._skips_since)
        last = "They were the run's last ones. " if is_last else ""
        more = " and a larger `max_steps` or `num_train_epochs`" if is_last else ""
        self.error = TooFewRewardsError(
            f"{self._skipped_in_a_row} generation batches in a row had fewer than "
            f"{self.min_valid_reward_fraction:.0%} of their completions scored, since {began:%Y-%m-%d %H:%M:%S}. "
            f"{last}Failures in the last one: {_counted(self._missing)}. A checkpoint was saved. Fix the causes and "
            f"resume with {self._resume(step)}{more}."
        )
        self.error.is_resumable = not is_last  # the same command would be finished

    def record_micro_batch(self) -> None:
        self._moves = self._moves or not self.is_skipping

    def drain_moves(self) -> bool:
        """Whether any micro-batch since the last call counted. If not, the optimizer must not change the weights."""
        moves, self._moves = self._moves, False
        return moves

    def record_line(self, figures: Mapping[str, object]) -> None:
        """Record a training log line. Raises `DivergedError` if the gradient or the KL diverged in several lines in a
        row. Saves nothing then, as diverged weights would replace a good checkpoint."""
        norm, kl = figures.get(GRADIENT_NORM), figures.get(ALL_KL)
        if not isinstance(norm, float):  # a line of evaluation or failure reasons
            return
        broken = {} if math.isfinite(norm) else {GRADIENT_NORM: norm}
        if isinstance(kl, float) and kl > MAX_KL:  # NaN without tokens
            broken[ALL_KL] = kl
        self._broken_in_a_row = self._broken_in_a_row + 1 if broken else 0
        if self._broken_in_a_row >= BROKEN_LINES:
            broke = " and ".join(f"`{name}` is {value:g}" for name, value in broken.items())
            raise DivergedError(
                f"{broke}, in the last of {BROKEN_LINES} diverged log lines in a row. Expected a finite gradient "
                f"norm, and a KL of at most {MAX_KL:g} nats per token. The diverged weights were not saved. Resume "
                "from an earlier checkpoint with a lower learning rate."
            )

    def stop(self, step: int, *, is_new: bool) -> None:
        """End the run after `step` optimizer steps, by request or without budget. `is_new`: it did some steps."""
        if self.requested is not None:
            self.error = RunStopped(self.stopped_by(self.requested, step, is_new=is_new))
            return
        state = "A checkpoint was saved; resume" if is_new else "No further step was done, and nothing is lost. Resume"
        again = self._resume(step) if step else "the same command"
        self.error = self.budget_spent(f"{state} with a larger limit and {again}")

    def budget_spent(self, what_next: str) -> RunStopped:
        assert self.spending is not None
        return RunStopped(f"the budget is spent: {self.spending.reported()}. {what_next}.")

    def stopped_by(self, reason: str | None, step: int, *, is_new: bool) -> str:
        if not is_new:
            return f"stopped by {reason} before another step was done. Nothing is lost: rerun the same command."
        return f"stopped by {reason} after {step} steps. A checkpoint was saved; resume with {self._resume(step)}."

    def _resume(self, step: int) -> str:
        return f"--resume_from_checkpoint {Path(self.output_dir) / f'{CHECKPOINT_FOLDERS}{step}'}"


def _counted(missing: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in missing.most_common(5))
