"""The totals of an epoch, at its end and at the end of the run: one line, and figures for the trackers.

Owns the sums, their names and their wording. The figures come from the trainer's log lines. Steps after an epoch's
last log line count in the next epoch. A callback of the trainer, built by `wiring.components`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from salesrl_trl.names import EPOCH_TOTALS, FAILURE_REASONS, STEP_SECONDS, Phase, time_of
from salesrl_trl.telemetry.step_lines import Logs, clock, failures_shown, figures_shown, shares, tags_shown

logger = logging.getLogger(__name__)
TOKENS = "num_tokens"
"""TRL's tag: tokens of all prompts and completions so far."""


class EpochLine(TrainerCallback):
    """Logs the totals of an epoch: steps, the means of figures that the console shows, tokens, seconds by phase,
    failures by reason.

    Every rank logs the same figures: under the same names at each epoch, and failures by reason in an entry of their
    own, because new reasons may come. `failures` returns those since the last line; `log` gives figures to the
    trackers.
    """

    def __init__(
        self,
        branches: Sequence[str],
        failures: Callable[[], Mapping[str, int]],
        log: Callable[[dict[str, float | None]], None],
    ) -> None:
        self._branches = branches
        self._failures = failures
        self._log = log
        self._last_step, self._tokens = 0, 0.0
        self._start_over()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self._last_step, self._tokens = state.global_step, float(state.num_input_tokens_seen)
        self._start_over()

    def _start_over(self) -> None:
        self._first_step, self._first_tokens = self._last_step, self._tokens
        self._seconds = dict.fromkeys((*map(time_of, Phase), STEP_SECONDS), 0.0)
        self._sums = dict.fromkeys(tags_shown(self._branches), (0.0, 0))  # sum over steps, and steps
        self._counts = Counter[str]()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Logs | None = None,
        **_: object,
    ) -> None:
        if logs is None or "reward" not in logs:
            return
        steps = state.global_step - self._last_step
        for name in self._seconds:
            self._seconds[name] += (logs.get(name) or 0.0) * steps
        for name, (total, count) in self._sums.items():
            value = logs.get(name)
            if value is not None:
                self._sums[name] = (total + value * steps, count + steps)
        self._counts.update(self._failures())
        self._last_step, self._tokens = state.global_step, logs.get(TOKENS) or self._tokens

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self._last_step > self._first_step:
            if state.is_world_process_zero:
                logger.info(self._line(state.epoch or 0.0))
            self._log({f"{EPOCH_TOTALS}{name}": value for name, value in self._totals().items()})
            if self._counts:
                reasons = {f"{EPOCH_TOTALS}{FAILURE_REASONS}{name}": float(n) for name, n in self._counts.items()}
                self._log({**reasons})
        self._start_over()

    def _means(self) -> dict[str, float | None]:
        return {name: total / count if count else None for name, (total, count) in self._sums.items()}

    def _totals(self) -> dict[str, float | None]:
        return {
            "steps": float(self._last_step - self._first_step),
            "tokens": self._tokens - self._first_tokens,
            "failures": float(self._counts.total()),
            **self._means(),
            **self._seconds,
        }

    def _line(self, epoch: float) -> str:
        """`[Epoch 1.00] steps 1-120 | reward fairness=0.47 | 1.2 M tokens | 4:12, generation 60% | failures none`."""
        wall = self._seconds[STEP_SECONDS]
        parts = (
            f"[Epoch {epoch:.2f}] steps {self._first_step + 1}-{self._last_step}",
            *figures_shown(self._means(), self._branches),
            f"{(self._tokens - self._first_tokens) / 1e6:.2f} M tokens",
            f"{clock(wall)}, {shares(self._seconds)}" if wall else "time not measured",
            failures_shown(self._counts),
        )
        return " | ".join(parts)
