"""The report at the end of a run that has TensorBoard's files."""

import logging
from pathlib import Path

from transformers import TrainerState, TrainingArguments

from salesrl_trl.record.view.report_page import write_report
from salesrl_trl.wiring.part import Part

logger = logging.getLogger(__name__)


class ClosingReport(Part):
    """Writes the run's page and text at the end of training and of a last evaluation. A failure ends no run."""

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        if state.is_world_process_zero:
            try:
                write_report(Path(args.output_dir))
            except Exception as error:  # the policy of the run is not saved yet
                logger.warning(
                    f"[PartContext] no report could be written ({type(error).__name__}): `salesrl report` says why"
                )

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        if state.global_step >= state.max_steps:
            self.on_train_end(args, state)
