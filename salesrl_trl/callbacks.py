"""What a person reads while a run goes on.

Owns the line per step and its wording, and TensorBoard's layout. Figures come from the trainer's log; nothing is
measured here but elapsed time.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import TensorBoardCallback

from salesrl_trl.kl.law import KLTarget
from salesrl_trl.names import (
    JUDGE_SECONDS,
    REWARD_SECONDS,
    STEP_SECONDS,
    Phase,
    outcome_of,
    reward_of,
    time_of,
    usage_of,
)
from salesrl_trl.telemetry.layout import custom_scalars
from salesrl_trl.types import Outcome

logger = logging.getLogger(__name__)


def take_over_the_console(trainer: Trainer, *callbacks: TrainerCallback) -> None:
    """Put these callbacks in the place of transformers' own lines.

    Those print all of a step's figures, two hundred here, beside a progress bar. TensorBoard has all of them.
    """
    for stock in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(stock)
    for callback in callbacks:
        trainer.add_callback(callback)


class StepLine(TrainerCallback):
    """Two lines per logged step: reward by branch, valid actions, failures by reason, seconds; and the judges' work.

    Args:
        branches (`Sequence[str]`):
            Branch names.
        providers (`Sequence[str]`):
            Judge providers.
        failures (`Callable[[], Mapping[str, int]]`):
            Returns the failures since the last line, by reason.
    """

    def __init__(
        self, branches: Sequence[str], providers: Sequence[str], failures: Callable[[], Mapping[str, int]]
    ) -> None:
        self._branches = branches
        self._providers = providers
        self._failures = failures
        self._started = self._last = time.perf_counter()
        self._last_step = 0
        self._after_first: tuple[float, int] | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._started = self._last = time.perf_counter()
        self._last_step = state.global_step
        self._after_first = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if not state.is_world_process_zero or logs is None or "reward" not in logs:
            return
        now = time.perf_counter()
        step, elapsed = state.global_step, now - self._started
        seconds = (now - self._last) / max(step - self._last_step, 1)
        # The first line's steps have an evaluation before them, compile, and open connections: they tell nothing of
        # those to come, unless there are no others yet.
        if self._after_first is None:
            average = seconds - (logs.get(time_of(Phase.EVALUATION)) or 0.0)
            self._after_first = (now, step)
        else:
            average = (now - self._after_first[0]) / max(step - self._after_first[1], 1)
        line = step_line(step, state.max_steps, logs, self._branches, self._failures(), seconds)
        progress = f"avg {average:.1f} s, elapsed {clock(elapsed)}, ETA {clock(average * (state.max_steps - step))}"
        logger.info(" | ".join(part for part in (line, progress, shares(logs)) if part))
        logger.info(judge_line(step, logs, self._providers))
        self._last, self._last_step = now, step


def step_line(
    step: int,
    max_steps: int,
    logs: Mapping[str, Any],
    branches: Sequence[str],
    failures: Mapping[str, int],
    seconds: float,
) -> str:
    """The line of one step, as `StepLine` logs it."""
    rewards = " ".join(f"{branch}={figure(logs.get(reward_of(branch)))}" for branch in branches)
    invalid = logs.get(outcome_of(Outcome.INVALID_ACTION))
    valid = "n/a" if invalid is None else f"{1 - invalid:.0%}"
    failed = " ".join(f"{reason}={count}" for reason, count in sorted(failures.items())) or "none"
    if logs.get("frac_reward_zero_std") == 1:
        failed += " | the rewards of each group are equal: nothing to learn from"
    return (
        f"[Step {step}/{max_steps}] reward {rewards} | valid actions {valid} | failures {failed} | "
        f"{seconds:.1f} s, rewards {figure(logs.get(REWARD_SECONDS))} s"
    )


SHOWN_SHARE = 0.01
"""Phases with less of a step are not worth a place in the line."""


def shares(logs: Mapping[str, Any]) -> str:
    """`reward_wait 78%, generation 14%, backward 5%`: of the step's wall time, largest first; empty where it was not
    measured."""
    wall = logs.get(STEP_SECONDS)
    if not wall:
        return ""
    parts = sorted(((logs.get(time_of(phase)) or 0.0) / wall, phase) for phase in Phase)
    return ", ".join(f"{phase} {share:.0%}" for share, phase in reversed(parts) if share >= SHOWN_SHARE)


def clock(seconds: float) -> str:
    """`1:31` minutes and seconds, `2:01:31` with hours."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def judge_line(step: int, logs: Mapping[str, Any], providers: Sequence[str]) -> str:
    """`[Judge@step5] time=3.2s providers={'openai': 8}`: seconds from the first verdict asked for to the last that
    came, and verdicts by provider, per generation batch."""
    verdicts = {provider: logs.get(usage_of(provider, "verdicts")) or 0 for provider in providers}
    counts = {provider: int(count) if count == int(count) else round(count, 1) for provider, count in verdicts.items()}
    return f"[Judge@step{step}] time={logs.get(JUDGE_SECONDS) or 0:.1f}s providers={counts}"


def figure(value: Any) -> str:
    """A figure to two places, `n/a` where there is none."""
    return f"{value:.2f}" if isinstance(value, int | float) else "n/a"


class ScalarLayout(TrainerCallback):
    """Groups the figures under TensorBoard's "Custom Scalars" tab, where a run reports to it.

    Args:
        branches (`Sequence[str]`):
            Branch names.
        targets (`Mapping[str, KLTarget]`):
            KL targets by branch, where there are any.
        callbacks (`Sequence[TrainerCallback]`):
            The trainer's, TensorBoard's perhaps among them.
    """

    def __init__(
        self, branches: Sequence[str], targets: Mapping[str, KLTarget], callbacks: Sequence[TrainerCallback]
    ) -> None:
        self._layout = custom_scalars(branches, [name for name, target in targets.items() if target.has_band])
        self._callbacks = callbacks

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        for callback in self._callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
                callback.tb_writer.add_custom_scalars(self._layout)
