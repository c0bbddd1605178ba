"""The record of quick evaluations: metrics, log lines, the file, the Pareto front, and the best so far."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from salesrl_trl.config.quick_evaluations import BETA, OWN_FIGURES, SCORE, TAKEN, WORST_BRANCH, Figure
from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.process import write_whole
from salesrl_trl.ground.row_statistics import mean, pareto_front
from salesrl_trl.ground.texts import NOT_KNOWN, number
from salesrl_trl.names import REWARD
from salesrl_trl.types import Answered

Record = Mapping[str, Any]  # an evaluation, or its part for a branch, as a JSON object
SHOWN_ON_FRONT = 5  # latest evaluations on the front to show


def mean_reward(answers: Iterable[Answered]) -> float | None:
    """Mean reward of the scored answers; `None` without any."""
    return mean([answer.reward.value for answer in answers if answer.reward.value is not None])


def checked_figures(objects: Iterable[object], branches: Sequence[str] = ()) -> tuple[Figure, ...]:
    """Metrics from objects, or from classes instantiated without arguments. Raises `ConfigError` if one is not a
    `Figure`, its name is not an identifier or is taken, e.g. by a branch, or its `form` is invalid."""
    figures: list[Figure] = []
    taken = {*TAKEN, *branches}
    for item in objects:
        try:
            made = item() if isinstance(item, type) else item
            if not isinstance(made, Figure):
                raise TypeError("it lacks one of `name`, `form` and `__call__`")
            format(0.5, made.form)
        except (TypeError, ValueError) as error:
            needs = "a class without arguments that has `name`, a `form` such as '.2f', and `__call__(answers)`"
            raise ConfigError(f"`quick_eval_figures` contains {item!r}: {error}. Expected {needs}.") from error
        if not str(made.name).isidentifier() or made.name in taken:
            expected = f"Expected letters, digits and underscores, and none of: {', '.join(sorted(taken))}."
            raise ConfigError(f"`quick_eval_figures`: {item!r} has the name {made.name!r}. {expected}")
        taken.add(made.name)
        figures.append(made)
    return tuple(figures)


def measure(figure: Figure, answers: Sequence[Answered]) -> float | None:
    """A metric of some answers; `None` without answers, or if it is not finite."""
    value = figure(answers) if answers else None
    return float(value) if value is not None and math.isfinite(value) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickEvaluation:
    """One evaluation, with the fields of its record."""

    step: int
    reward: float | None  # mean reward of all scored answers
    branches: Mapping[str, Record]
    """By name, in the order of the settings: `rows` (answers), `scored` (scored answers), and metrics by name: `score`
    (mean reward of those), `truncated` (share), `length` (mean tokens), `kl` (nats per token), `beta`, and your own. A
    metric is `None` if it could not be measured."""
    seconds: float
    mode: str = "greedy"
    figures: Mapping[str, float | None] = field(default_factory=dict)
    """Your own metrics over the answers of all branches, by name."""

    def score(self, by: str, least_scored: float = 0.0) -> float | None:
        """The metric that selects the best policy (`QuickEvalSettings.best`). `None` if it could not be measured, or
        if less than the share `least_scored` of a branch was scored: a few lucky answers are not an evaluation."""
        of_all = by in (WORST_BRANCH, REWARD, *self.figures)
        about = [measured for name, measured in self.branches.items() if measured["rows"] and (of_all or by == name)]
        scores = [measured[SCORE] for measured in about if measured["scored"] >= least_scored * measured["rows"]]
        known = [score for score in scores if score is not None]
        if not known or len(known) < len(about):
            return None
        if by in self.figures:
            return self.figures[by]
        return self.reward if by == REWARD else min(known)

    def line(self, figures: Sequence[Figure] = ()) -> str:
        """`[QuickEval@20] mode=greedy fairness=0.41 ... truncated F=0% ... length F=28 ... KL F=0.12 ... beta F=0.05`,
        then these metrics, for the branches that have them."""
        words = [f"[QuickEval@{self.step}] mode={self.mode}"]
        for name, measured in self.branches.items():
            scored = f" ({measured['scored']} of {measured['rows']} scored)"
            few = scored if measured["scored"] < measured["rows"] else ""
            words.append(f"{name}={number(measured[SCORE], '.2f')}{few}")
        letters = initials(list(self.branches))
        has_kl = any(values[BETA] is not None for values in self.branches.values())
        left_out = {SCORE} if has_kl else {SCORE, "kl", BETA}
        shown = {**OWN_FIGURES, BETA: ".3g"}
        given = {own.name: own.form for own in figures}
        for figure, form in [*(each for each in shown.items() if each[0] not in left_out), *given.items()]:
            words.append(figure.upper() if figure == "kl" else figure)
            words += [
                f"{letters[name]}={number(values[figure], form)}"
                for name, values in self.branches.items()
                if values[figure] is not None or figure not in given
            ] or [NOT_KNOWN]
        return " ".join(words)


def evaluation_of(
    answers: Sequence[Answered], branches: Sequence[str], betas: Mapping[str, float], step: int, seconds: float,
    figures: Sequence[Figure] = (),
) -> QuickEvaluation:  # fmt: skip
    """The evaluation after `step` optimizer steps, from its answers. `figures`: in addition to the built-in
    metrics."""
    by_branch = {}
    for branch in branches:
        own = [answer for answer in answers if answer.branch == branch]
        measured = [(answer.kl, answer.kl_tokens) for answer in own if answer.kl is not None and answer.kl_tokens]
        kl = sum(kl for kl, _ in measured) / sum(tokens for _, tokens in measured) if measured else math.nan
        by_branch[branch] = {
            "rows": len(own),
            "scored": sum(answer.reward.value is not None for answer in own),
            SCORE: mean_reward(own),
            "truncated": mean([answer.truncated for answer in own]),
            "length": mean([answer.tokens for answer in own]),
            "kl": kl if math.isfinite(kl) else None,
            BETA: betas.get(branch),
            **{figure.name: measure(figure, own) for figure in figures},
        }
    return QuickEvaluation(
        step=step,
        reward=mean_reward(answers),
        branches=by_branch,
        seconds=seconds,
        figures={figure.name: measure(figure, answers) for figure in figures},
    )


class QuickEvalHistory:
    """The evaluations of a run, in a file that a resumed run continues. The metric `best` selects the best policy, if
    at least the share `least_scored` of each branch's answers was scored."""

    def __init__(self, path: Path, best: str | None, least_scored: float) -> None:
        self.path = path
        self._best = best
        self._least_scored = least_scored
        self.evaluations: list[QuickEvaluation] = []
        self.best: QuickEvaluation | None = None

    def resume(self, records: Sequence[Record], step: int) -> None:
        """Resume from a record. Evaluations after `step` are dropped, because they will be repeated."""
        self.evaluations, self.best = [], None
        for record in records:
            if record["step"] <= step:
                self.add(QuickEvaluation(**{name: value for name, value in record.items() if name != "best"}))

    def read(self) -> list[Record]:
        """The record on disk, up to the first incomplete line."""
        if not self.path.is_file():
            return []
        records: list[Record] = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break  # the run was killed while writing
        return records

    def write(self) -> None:
        records = [{**asdict(evaluation), "best": evaluation is self.best} for evaluation in self.evaluations]
        write_whole(self.path, "".join(f"{json.dumps(record)}\n" for record in records))

    def add(self, evaluation: QuickEvaluation) -> bool:
        """Add one; returns whether it is the best so far."""
        self.evaluations.append(evaluation)
        if self._best is None:
            return False
        score = evaluation.score(self._best, self._least_scored)
        known = None if self.best is None else self.best.score(self._best, self._least_scored)
        if score is None or (known is not None and score <= known):
            return False
        self.best = evaluation
        return True

    def front(self) -> list[QuickEvaluation]:
        """The Pareto-optimal evaluations over the branches, in the order of their steps."""
        least = self._least_scored
        scores = [{branch: each.score(branch, least) for branch in each.branches} for each in self.evaluations]
        return [self.evaluations[index] for index in pareto_front(scores)]

    def front_line(self) -> str:
        """`[Pareto@40] 2 of 4 evaluations on the front: step 20 (fairness 0.40, hallucination 0.52), ...`: the latest
        `SHOWN_ON_FRONT` of them."""
        front = self.front()
        shown = ["..."] if len(front) > SHOWN_ON_FRONT else []
        for evaluation in front[-SHOWN_ON_FRONT:]:
            scores = [f"{name} {number(measured[SCORE], '.2f')}" for name, measured in evaluation.branches.items()]
            shown.append(f"step {evaluation.step} ({', '.join(scores)})")
        count = f"{len(front)} of {len(self.evaluations)} evaluations on the front"
        return f"[Pareto@{self.evaluations[-1].step}] {count}: {', '.join(shown) or 'none'}"


def initials(names: Sequence[str]) -> dict[str, str]:
    """The shortest unique capitalised prefixes: `{"fairness": "F", "hallucination": "H"}`."""
    short = {}
    for name in names:
        others = [other.capitalize() for other in names if other != name]
        starts = [name[: length + 1].capitalize() for length in range(len(name))]
        unique = (start for start in starts if not any(other.startswith(start) for other in others))
        short[name] = next(unique, name.capitalize())
    return short
