"""Whether a generation batch counts, and whether the run goes on; the error that ends it. And what all ranks decide
together."""

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

GRADIENT_NORM = "grad_norm"  # figure of transformers, before clipping. It logs no loss that is not finite.
MAX_KL = 1000.0  # in nats per token. Above it a run is broken; usual bands end below 1.
BROKEN_LINES = 3  # log lines in a row with broken figures that end a run. One may come from one odd batch.
SKIPPED_AT_END = 2
"""Skipped batches in a row at a run's last step that make it a failure: no later one shows that services are back."""

MAX_OUTAGE_S = 3600.0  # `max_outage_s` of a training


def on_any_rank(condition: bool, device: torch.device) -> bool:
    """A collective."""
    return bool(highest(condition, device))


def highest(number: int, device: torch.device) -> int:
    """The highest number of all ranks; a collective."""
    if PartialState().num_processes == 1:
        return number
    return int(gather(torch.tensor([number], device=device)).max())


class SpendingAccount(Protocol):
    """What a run has spent, by its account."""

    def in_words(self) -> str: ...

    def reported(self) -> str:
        """With the limits that are reached."""

    def is_reached(self) -> bool:
        """Whether a limit is."""


@dataclass(eq=False, kw_only=True)
class RunControl:
    """Decides for one run, and after `restart` for the next. `SalesGRPOConfig` describes the fields."""

    min_valid_reward_fraction: float
    max_skipped_generations: int  # at the last step, `SKIPPED_AT_END` are enough
    max_outage_s: float = math.inf
    output_dir: str = ""

    def __post_init__(self) -> None:
        self.spending: SpendingAccount | None = None  # of a run with a budget
        self.restart()

    def restart(self) -> None:
        self.requested: str | None = None  # the signal or caller that asked this rank to stop
        self.error: SalesRLError | None = None  # ends the run after the step under way
        self.is_skipping = False  # the generation batch in training is left out of the loss
        self.is_spent = False  # whether `is_refused_by_budget` held on any rank, in training or in an evaluation
        self._moves = False
        self._skipped_in_a_row = 0
        self._skips_since = 0.0
        self._is_out_too_long = False
        self._missing: Counter[str] = Counter()
        self._broken_in_a_row = 0

    def record_batch(self, scored_fraction: float, missing: Counter[str]) -> str | None:
        """Skip a batch with too few scored completions. `missing` has the number of unscored ones by reason code.
        Returns a warning; `None` for a batch that counts."""
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
        """Whether the budget left completions of this rank without a reward, by the account too: a function may return
        that reason code, and a replayed record may hold it."""
        return BudgetSpent.default_code in reasons and self.spending is not None and self.spending.is_reached()

    def urgency(self) -> int:
        """This rank's reason to end the run: 2 if it was asked to stop, 1 if batches are skipped for too long."""
        is_long = self._skipped_in_a_row > 0 and time.monotonic() - self._skips_since >= self.max_outage_s
        return 2 if self.requested is not None else int(is_long)

    def record_urgency(self, urgency: int) -> None:
        """Record the highest `urgency` of all ranks."""
        if urgency == 2 and self.requested is None:
            self.requested = "a request to another rank"
        self._is_out_too_long = urgency == 1 and self._skipped_in_a_row > 0

    def end_step(self, step: int, *, is_last: bool) -> None:
        """End the run after this optimizer step if too many batches in a row were skipped, or for too long. `is_last`:
        training ends with this step anyway."""
        most = self.max_skipped_generations
        is_over = self._skipped_in_a_row >= (min(most, SKIPPED_AT_END) if is_last else most) or self._is_out_too_long
        if self.error is not None or not is_over:
            return
        began = datetime.now() - timedelta(seconds=time.monotonic() - self._skips_since)
        last = "They were the last of the run, so that it learned nothing from them. " if is_last else ""
        more = " and a larger `max_steps` or `num_train_epochs`" if is_last else ""
        self.error = TooFewRewardsError(
            f"{self._skipped_in_a_row} generation batches in a row had fewer than "
            f"{self.min_valid_reward_fraction:.0%} of their completions scored, since {began:%Y-%m-%d %H:%M:%S}. "
            f"{last}Failures in the last one: {_counted(self._missing)}. A checkpoint was saved; repair what the "
            f"reasons name and go on with {self._resume(step)}{more}."
        )
        self.error.is_resumable = not is_last  # the same command would find nothing left to learn

    def record_micro_batch(self) -> None:
        self._moves = self._moves or not self.is_skipping

    def drain_moves(self) -> bool:
        """Whether a micro-batch since the last call counted. If not, the optimizer must not move the weights."""
        moves, self._moves = self._moves, False
        return moves

    def record_line(self, figures: Mapping[str, object]) -> None:
        """Record the figures of a log line of training. Raises `DivergedError` where the gradient or the KL was broken
        in several lines in a row. Nothing is saved then: broken weights would take the place of a good checkpoint."""
        norm, kl = figures.get(GRADIENT_NORM), figures.get(ALL_KL)
        if not isinstance(norm, float):  # a line of evaluation, or of reasons
            return
        broken = {} if math.isfinite(norm) else {GRADIENT_NORM: norm}
        if isinstance(kl, float) and kl > MAX_KL:  # NaN: no token had one
            broken[ALL_KL] = kl
        self._broken_in_a_row = self._broken_in_a_row + 1 if broken else 0
        if self._broken_in_a_row >= BROKEN_LINES:
            broke = " and ".join(f"`{name}` is {value:g}" for name, value in broken.items())
            raise DivergedError(
                f"{broke}, and such figures came in {BROKEN_LINES} log lines in a row. Expected a finite norm of the "
                f"gradient, and a KL of at most {MAX_KL:g} nats per token. The weights are "
                "broken, so they were not saved. Go back to a checkpoint before that and learn more slowly."
            )

    def stop(self, step: int, *, is_new: bool) -> None:
        """End the run after `step` optimizer steps, on a request or for a spent budget. `is_new`: it did some."""
        if self.requested is not None:
            self.error = RunStopped(self.stopped_by(self.requested, step, is_new=is_new))
            return
        state = "The state was saved; go" if is_new else "No other step was done, and nothing is lost. Go"
        again = self._resume(step) if step else "the same command"
        self.error = self.budget_spent(f"{state} on with a larger limit and {again}")

    def budget_spent(self, what_next: str) -> RunStopped:
        assert self.spending is not None
        return RunStopped(f"the budget is spent: {self.spending.reported()}. {what_next}.")

    def stopped_by(self, reason: str | None, step: int, *, is_new: bool) -> str:
        if not is_new:
            return f"stopped by {reason} before another step was done. Nothing is lost: give the same command again."
        return f"stopped by {reason} after {step} steps. The state was saved; go on with {self._resume(step)}."

    def _resume(self, step: int) -> str:
        return f"--resume_from_checkpoint {Path(self.output_dir) / f'{CHECKPOINT_FOLDERS}{step}'}"


def _counted(missing: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in missing.most_common(5))
