"""The report at the end of a run. `components` makes it where a run has TensorBoard's files.

Owns when it is written: at the end of training, and after each evaluation behind it, such as the last one of a recipe.
"""

import logging
from pathlib import Path

from transformers import TrainerCallback, TrainerState, TrainingArguments

from salesrl_trl.view.report_page import write_report

logger = logging.getLogger(__name__)


class ClosingReport(TrainerCallback):
    """Writes the run's page and text into its folder. What keeps it from that is logged, and ends no run."""

    _has_ended = False

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._has_ended = False

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        self._has_ended = True
        if page := _written(args, state):
            logger.info(f"[Run] figures on a page: {page}")

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        if self._has_ended:
            _written(args, state)


def _written(args: TrainingArguments, state: TrainerState) -> Path | None:
    if not state.is_world_process_zero:
        return None
    try:
        return write_report(Path(args.output_dir))[1]
    except Exception as error:  # the policy of the run is not saved yet
        how = f"`python -m salesrl_trl.report {args.output_dir}` says why"
        logger.warning(f"[Run] no report could be written ({type(error).__name__}); {how}")
        return None
