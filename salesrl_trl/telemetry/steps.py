"""The beginnings and ends of a run's steps.

Owns the callback that marks them. Other work at the start and the end of a run is handed in.
"""

from collections.abc import Callable

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from salesrl_trl.names import Phase, StartUp
from salesrl_trl.telemetry.instruments import Instruments


class StepMarks(TrainerCallback):
    """Marks the start of a run, the end of each step, and the end of the run. `prepare`, `begin` and `end` are called
    before the first mark of a run, after it, and when the run has ended."""

    def __init__(
        self,
        instruments: Instruments,
        prepare: Callable[[], None],
        begin: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        self._instruments = instruments
        self._prepare = prepare
        self._begin = begin
        self._end = end

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self._prepare()
        self._instruments.timeline.end(StartUp.PREPARE)
        self._instruments.run_begins(state.global_step, state.max_steps)
        self._begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._instruments.timeline.end(Phase.OPTIMIZER)
        self._instruments.step_ends()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._end()
        self._instruments.timeline.stops()
