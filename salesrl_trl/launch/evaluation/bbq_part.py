"""BBQ's scores in the evaluations of a run whose held-out rows are BBQ's. `bbq` owns the formulas."""

import logging
import math
from collections.abc import Mapping

from salesrl_trl.launch.evaluation import bbq
from salesrl_trl.launch.evaluation.subject import Processes
from salesrl_trl.wiring.part import Part, PartContext

logger = logging.getLogger(__name__)


class BBQPart(Part):
    """Adds the scores to full evaluations, to their line, and to quick evaluations."""

    def connect(self, run: PartContext) -> None:
        self._ledger = run.ledger
        over_all, by_category, note = bbq.figures_of(run.trl.eval_dataset)
        self._figures = (*over_all, *by_category)
        self.quick_figures = over_all
        self.held_out_figures = {figure.name: figure.name for figure in over_all}
        if over_all:
            run.scoring.figure_columns = (*bbq.COLUMNS, bbq.TARGET)
        if note:
            logger.info(note)

    def figures(self, mode: str) -> Mapping[str, float]:
        if mode != "eval" or not self._figures:
            return {}
        answers = Processes().gather([(each.text, each.columns) for each in self._ledger.written])
        measured = {figure.name: figure.of(answers) for figure in self._figures}
        return {name: math.nan if value is None else value for name, value in measured.items()}
