"""The effects of a skipped batch and of a stop on TRL's loop.

Owns the callback. `run_control` decides.
"""

from collections.abc import Callable, Mapping

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from salesrl_trl.update.run_control import RunControl
from salesrl_trl.update.stopping import Stopping


class SkipAndStop(TrainerCallback):
    """Keeps a skipped batch from moving the policy by momentum, and ends a run that can't be scored or that diverged.

    Under DeepSpeed the optimizer steps inside `backward`, before this callback. There the gradient of a skipped batch
    is zero, but momentum still moves the weights. `drop_gradients` sets all gradients to `None`.
    """

    def __init__(self, run_control: RunControl, drop_gradients: Callable[[], None], stopping: Stopping) -> None:
        self._run_control = run_control
        self._drop_gradients = drop_gradients
        self._stopping = stopping

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self._stopping.begin()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self._stopping.begin_step()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        if self._run_control.drain_moves():
            self._stopping.optimizer_moves()
        else:
            self._drop_gradients()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, object],
        **_: object,
    ) -> None:
        self._run_control.record_line(logs)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._stopping.end_step()
        self._run_control.end_step(state.global_step, is_last=state.global_step >= state.max_steps)
        if self._run_control.error is not None:
            control.should_save = state.global_step > 0
            control.should_training_stop = True
            control.should_evaluate = False  # nothing could be scored

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self._run_control.error is not None:  # the epoch was left in its middle, and the step's end has saved
            control.should_evaluate = control.should_save = False
