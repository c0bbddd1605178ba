"""Quick evaluations: a fixed held-out sample, answered greedily every few steps.

Owns the steps at which one is due, and its order: answer, measure, record, keep the best policy, log. A `Subject`
answers.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from salesrl_trl.evaluation.answers import Answered, Ranks, Subject
from salesrl_trl.evaluation.best import BestPolicy
from salesrl_trl.evaluation.figures import BETA, OWN_FIGURES, checked_figures
from salesrl_trl.evaluation.record import (
    QuickEvalHistory,
    QuickEvalSettings,
    QuickEvaluation,
    evaluation_of,
)
from salesrl_trl.names import QUICK_EVAL, QUICK_EVAL_FILE, QUICK_SECONDS, REWARD, Phase, quick_of
from salesrl_trl.telemetry.timeline import Timeline
from salesrl_trl.types import Example, Outcome

logger = logging.getLogger(__name__)


class QuickEvaluator:
    """Evaluates a policy every few steps. All ranks call each method together.

    `subject`: the policy: it answers, is saved, and logs. `rows`: This rank's held-out rows, the same all through the
    run. `settings`: Steps between two evaluations, figures, and the figure that selects the best policy. `output_dir`:
    Folder of the record and of the best policy. `least_scored`: Share in [0, 1] of a branch's answers that have to be
    scored for its score to be compared. `timeline`: gets the phases of an evaluation. `is_cut`: whether the budget
    ended before all answers were scored. The same on all ranks.

    Raises:
        `ConfigError`: one of the figures is none, or has a name that is taken.
    """

    def __init__(
        self,
        subject: Subject,
        rows: Sequence[Example],
        *,
        branches: Sequence[str],
        settings: QuickEvalSettings,
        output_dir: Path,
        least_scored: float,
        ranks: Ranks,
        timeline: Timeline,
        is_cut: Callable[[], bool] = bool,
    ) -> None:
        self._subject = subject
        self._is_cut = is_cut
        self._rows = rows
        self._branches = branches
        self._settings = settings
        self._figures = checked_figures(settings.figures, branches)
        self.figure_names = tuple(figure.name for figure in (*OWN_FIGURES, *self._figures))
        """Names of the figures of each branch."""
        self._ranks = ranks
        self._timeline = timeline
        self._history = QuickEvalHistory(output_dir / QUICK_EVAL_FILE, settings.best, least_scored)
        self._best = BestPolicy(output_dir, settings.best, ranks)
        self._evaluated_step = 0

    def run_begins(self, step: int) -> None:
        """Go on with the record of the run so far.

        `step`: Optimizer steps done.
        """
        is_main = self._ranks.index == 0
        records, kept_step = self._ranks.from_main((self._history.read(), self._best.step) if is_main else ([], None))
        self._history.resume(records, step)
        # A run may have ended between a step's checkpoint and its evaluation. Then this evaluation is still due
        self._evaluated_step = step if self._history.has(step) else 0
        best = self._history.best
        if kept_step is None or (best is not None and best.step == kept_step):
            return
        # The policy in the folder is from an earlier run, or from a later step than the one this run resumes at
        self._history.best = None
        if is_main:
            aside = self._best.put_aside()
            logger.info(f"the best policy of an earlier start (step {kept_step}) is now in {aside}")

    def evaluate_if_due(self, step: int) -> None:
        """Evaluate after this step, if an evaluation is due and was not made yet.

        `step`: Optimizer steps done.
        """
        if step % self._settings.steps == 0 and step != self._evaluated_step:
            self._evaluated_step = step
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        started = time.perf_counter()
        with self._timeline.phase(Phase.EVALUATION):
            answers = self._ranks.gather(self._subject.answer(self._rows))
            if self._is_cut():  # the run ends, and a resume evaluates again
                if self._ranks.index == 0:
                    logger.info(f"[QuickEval@{step}] left out: the budget ended before all rows were scored")
                return
            betas, seconds = self._subject.betas(), time.perf_counter() - started
            evaluation = evaluation_of(answers, self._branches, betas, step, seconds, self._figures)
            # All ranks use the figures of the main rank, so that all of them save the policy, or none
            evaluation = self._ranks.from_main(evaluation)
            before = self._history.best
            is_best = self._history.add(evaluation)
        with self._timeline.phase(Phase.CHECKPOINT):
            is_kept = is_best and self._best.keep(evaluation, self._subject.save)
            if is_best and not is_kept:
                self._history.best = before  # the one in the folder is the one to beat
        with self._timeline.phase(Phase.LOGGING):
            if self._ranks.index == 0:
                self._report(evaluation, failures(answers), is_kept)
            self._subject.log(self._logged(evaluation))

    def _report(self, evaluation: QuickEvaluation, failed: Counter[str], is_kept: bool) -> None:
        reasons = "".join(f" {reason}={count}" for reason, count in sorted(failed.items()))
        logger.info(evaluation.line(self._figures) + (f" failures{reasons}" if failed else ""))
        logger.info(self._history.front_line())
        if is_kept:
            by = self._settings.best or REWARD
            logger.info(f"[Best@{evaluation.step}] {by} {evaluation.score(by):.3f}, saved in {self._best.folder}")
        try:
            self._history.write()
        except OSError as error:  # a full disk must not keep the other ranks waiting
            logger.warning(f"{self._history.path} can't be written ({type(error).__name__})")

    def _logged(self, evaluation: QuickEvaluation) -> dict[str, float | None]:
        overall = {REWARD: evaluation.reward, **evaluation.figures}
        logged = {f"{QUICK_EVAL}{name}": value for name, value in overall.items()}
        logged[QUICK_SECONDS] = evaluation.seconds
        for branch, found in evaluation.branches.items():
            logged |= {quick_of(branch, name): found.values[name] for name in (*self.figure_names, BETA)}
        return logged


def failures(answers: Iterable[Answered]) -> Counter[str]:
    """Reason codes of the answers that got no verdict."""
    return Counter(answer.reward.reason for answer in answers if answer.reward.outcome is not Outcome.OK)
