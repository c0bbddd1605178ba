"""Quick evaluations in a run. `quick` owns when they are due and what they do, `greedy` answers."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from salesrl_trl.launch.evaluation.greedy import GreedySubject
from salesrl_trl.launch.evaluation.quick import QuickEvaluator, sample
from salesrl_trl.launch.evaluation.subject import Processes
from salesrl_trl.wiring.part import Part, PartContext


class QuickEvalPart(Part):
    def connect(self, run: PartContext) -> None:
        self._run = run
        args, trl, settings, ranks = run.args, run.trl, run.quick_eval, Processes()
        assert settings is not None
        others = (figure for part in run.parts for figure in part.quick_figures if figure not in settings.figures)
        settings = replace(settings, figures=(*others, *settings.figures))
        control = run.run_control
        self.evaluator = QuickEvaluator(
            GreedySubject(run), sample(trl.eval_dataset, settings.rows, run.branches, ranks), branches=args.branches,
            settings=settings, output_dir=Path(args.output_dir), least_scored=args.min_valid_reward_fraction,
            ranks=ranks, timeline=run.instruments.timeline, is_cut=lambda: control.is_spent,
        )  # fmt: skip
        run.figures.words["figure"] = self.evaluator.figure_names

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.evaluator.run_begins(self._run.trl.step())

    def after_step(self, step: int) -> None:
        self.evaluator.evaluate_if_due(step)
