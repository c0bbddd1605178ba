"""What a run has spent, for its figures and messages, and what it will spend.

Owns the forecast and the wording. Reads the account that the rewards' processes write.
"""

import logging
import time
from collections.abc import Sequence, Sized
from dataclasses import dataclass

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig

from salesrl_trl.errors import ConfigError
from salesrl_trl.evaluation.record import QuickEvalSettings
from salesrl_trl.names import BUDGET_CALLS, BUDGET_USD, REWARD
from salesrl_trl.reward.service.budget import NOTHING_SPENT, Account, Limit
from salesrl_trl.reward.service.meter import Budget
from salesrl_trl.reward.service.spent_file import read_account
from salesrl_trl.telemetry.step_lines import Logs, calls_and_usd, clock

logger = logging.getLogger(__name__)

FORECAST_STEPS = 3
"""Steps after that of the first line from which the forecast is made. The first one also starts everything up."""


class Spending:
    """The account of a run. A run without a budget has no figures.

    Args:
        budget (`Budget`, *optional*):
            Of the run.
    """

    def __init__(self, budget: Budget | None) -> None:
        self.terms = None if budget is None else budget.terms
        self._account = NOTHING_SPENT

    def account(self) -> Account:
        """What has been spent so far, by the file; as it was at the last look if the file can't be read."""
        try:
            if self.terms is not None:
                self._account = read_account(self.terms.path)
        except ConfigError as error:
            logger.warning(str(error))
        return self._account

    def figures(self) -> dict[str, float]:
        """The figures of a log line."""
        if self.terms is None:
            return {}
        total = self.account().total()
        return {BUDGET_CALLS: total.calls, BUDGET_USD: total.usd}

    def told(self) -> str:
        """What was spent, and which limits are reached."""
        account = self.account()
        return told(account, account.reached(self.limits))

    def is_reached(self) -> bool:
        """Whether a limit is reached."""
        return bool(self.account().reached(self.limits))

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The limits of the run."""
        return () if self.terms is None else self.terms.limits


def told(account: Account, reached: Sequence[Limit]) -> str:
    """`1,000 calls, 0.42 USD were spent; reached: max_calls 1,000`."""
    total = account.total()
    names = ", ".join(f"`{each.name}` {each.most:,g}" for each in reached)
    return f"{calls_and_usd(total.calls, total.usd)} were spent; reached: {names}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluations:
    """What a run's evaluations are worth, as a share of a step's completions."""

    every: int = 0
    """Steps between two quick evaluations. 0: there are none."""
    quick: float = 0.0
    """Completions of a quick evaluation, by those of a step."""
    last: float = 0.0
    """Completions of the evaluation after the last step, by those of a step."""

    def between(self, first: int, last: int) -> float:
        """What the quick evaluations after these steps, and after those between them, are worth."""
        return self.quick * (last // self.every - (first - 1) // self.every) if self.every else 0.0


def evaluations_of(
    args: GRPOConfig, quick: QuickEvalSettings | None, dataset: object, generations: int
) -> Evaluations:
    """Those of a run with these settings.

    Args:
        args (`GRPOConfig`):
            The trainer's settings: how many completions a step has.
        quick (`QuickEvalSettings`, *optional*):
            Quick evaluations.
        dataset (`object`):
            The held-out rows.
        generations (`int`):
            Completions of each row after the last step. 0 without that evaluation.
    """
    rows = len(dataset) if isinstance(dataset, Sized) else 0
    step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size / args.num_iterations
    every, of_quick = (quick.steps, min(quick.rows, rows)) if quick is not None else (0, 0)
    return Evaluations(every=every, quick=of_quick / step, last=rows * generations / step)


def forecast(
    limits: Sequence[Limit],
    first: Account,
    now: Account,
    steps: tuple[int, int, int],
    seconds: tuple[float, float],
    evaluations: Evaluations = Evaluations(),
) -> str:
    """What the whole run will take, by its steps between two lines.

    Args:
        limits (`Sequence[Limit]`):
            The limits of the budget.
        first (`Account`), now (`Account`):
            The account at the two lines.
        steps (`tuple[int, int, int]`):
            Steps done at the two lines, and those of the whole run.
        seconds (`tuple[float, float]`):
            Seconds between the two lines, and those of the run until now.
        evaluations (`Evaluations`, *optional*):
            Those to come. A completion of theirs is taken to cost as much as one of a step.
    """
    began, done, all_steps = steps
    measured, left = done - began, all_steps - done
    # A step's line comes before its quick evaluation. Those between the two lines are in the mean already
    quick, counted = evaluations.between(done, all_steps), evaluations.between(began, done - 1)
    to_come = max(left + quick - counted * left / measured, 0.0)
    share = (to_come + evaluations.last) / measured
    before, total = first.total(), now.total()
    calls, usd = (there + (there - then) * share for then, there in
                  ((before.calls, total.calls), (before.usd, total.usd)))  # fmt: skip
    lasts = clock(seconds[1] + seconds[0] * share)
    text = f"by the first {done} steps, about {calls_and_usd(calls, usd)} and {lasts} in all"
    ends = []
    for limit in limits:
        a_step = (now.used(limit) - first.used(limit)) / measured
        rest = limit.most - now.used(limit)
        if rest < a_step * to_come:
            step = max(int(done + rest / a_step * left / to_come), done)
            ends.append(f"{limit.name} is reached after step {step} of {all_steps}")
        elif rest < a_step * (to_come + evaluations.last):
            ends.append(f"{limit.name} is reached in the evaluation after the last step")
    return f"{text}; {', '.join(ends) or 'no limit is reached'}" if limits else text


class ForecastLine(TrainerCallback):
    """Logs once what the whole run will take.

    Args:
        spending (`Spending`):
            The account.
        evaluations (`Evaluations`):
            Those of the run.
    """

    def __init__(self, spending: Spending, evaluations: Evaluations) -> None:
        self._spending = spending
        self._evaluations = evaluations
        self._started = 0.0
        self._first: tuple[int, float, Account] | None = None
        self._is_done = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self._started, self._first, self._is_done = time.perf_counter(), None, False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Logs | None = None,
        **_: object,
    ) -> None:
        is_wanted = state.is_world_process_zero and self._spending.terms is not None and not self._is_done
        if not is_wanted or logs is None or REWARD not in logs:
            return
        step, now = state.global_step, time.perf_counter()
        if self._first is None:
            self._first = (step, now, self._spending.account())
            return
        began, at, account = self._first
        if step - began < FORECAST_STEPS:
            return
        self._is_done = True
        steps, seconds = (began, step, state.max_steps), (now - at, now - self._started)
        text = forecast(self._spending.limits, account, self._spending.account(), steps, seconds, self._evaluations)
        logger.info(f"[Run] {'forecast':<12} {text}")
