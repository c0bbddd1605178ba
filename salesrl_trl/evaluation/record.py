"""The record of quick evaluations: their figures, the line of each, the file, the Pareto front, and the best so far.

Owns the file's format and the rule that selects the best. It makes no answers and keeps no policy.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from salesrl_trl.evaluation.answers import Answered
from salesrl_trl.evaluation.figures import (
    BETA,
    OWN_FIGURES,
    SCORE,
    WORST_BRANCH,
    Figure,
    mean_reward,
    measure,
)
from salesrl_trl.evaluation.pareto import pareto_front
from salesrl_trl.ground.process import write_whole
from salesrl_trl.names import REWARD

Record = Mapping[str, Any]
"""One evaluation as a JSON object."""
SHOWN_ON_FRONT = 5
"""Evaluations on the front that a line names: the latest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickEvalSettings:
    """Settings of quick evaluations: `QuickEvalSettings(steps=20, best="worst_branch")`."""

    steps: int = 0
    """Optimizer steps from one to the next; 0 for none."""
    rows: int = 16
    """Held-out rows, spread evenly over the branches."""
    best: str | None = None
    """The figure that selects the best policy: `reward`, `worst_branch`, a branch's name or a figure's name. `None`
    keeps no policy."""
    figures: tuple[Figure, ...] = ()
    """Figures of your own, beside those of the package."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchFigures:
    """One branch in one evaluation."""

    rows: int
    """Answers."""
    scored: int
    """Answers that could be scored."""
    values: Mapping[str, float | None]
    """Figures by name: `score` (mean reward of those), `truncated` (share), `length` (mean tokens), `kl` (nats per
    token), `beta`, and your own. `None` if it could not be measured."""

    @property
    def score(self) -> float | None:
        """Mean reward of the answers that could be scored."""
        return self.values[SCORE]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickEvaluation:
    """One evaluation."""

    step: int
    """Optimizer steps before it."""
    reward: float | None
    """Mean reward of all answers that could be scored."""
    branches: Mapping[str, BranchFigures]
    """By name, in the order of the settings."""
    seconds: float
    """Its duration."""
    mode: str = "greedy"
    """The way of sampling."""
    figures: Mapping[str, float | None] = field(default_factory=dict)
    """Figures of your own over the answers of all branches, by name."""

    def score(self, by: str, least_scored: float = 0.0) -> float | None:
        """The figure that selects the best policy.

        `by`: `reward`, `worst_branch`, a branch's name or the name of one of `figures`. `least_scored`: Share in [0,
        1] of each branch's answers that have to be scored: a few lucky answers are no evaluation.

        Returns:
            `float` or `None`: `None` if it could not be measured, or if too little of one of its branches was scored.
        """
        about = [figures for name, figures in self.branches.items() if figures.rows and by in self._names(name)]
        scores = [figures.score for figures in about if figures.scored >= least_scored * figures.rows]
        known = [score for score in scores if score is not None]
        if not known or len(known) < len(about):
            return None
        if by in self.figures:
            return self.figures[by]
        return self.reward if by == REWARD else min(known)

    def _names(self, branch: str) -> tuple[str, ...]:
        """The values of `by` that depend on this branch, alone or together with others."""
        return branch, WORST_BRANCH, REWARD, *self.figures

    def scores(self, least_scored: float) -> dict[str, float | None]:
        """Scores by branch, for the comparison with other evaluations; `None` as in `score`."""
        return {name: self.score(name, least_scored) for name in self.branches}

    def line(self, figures: Sequence[Figure] = ()) -> str:
        """`[QuickEval@20] mode=greedy fairness=0.41 ... truncated F=0% ... length F=28 ... KL F=0.12 ... beta
        F=0.05`, then the figures given here."""
        letters = initials(list(self.branches))

        def each(name: str, form: str) -> str:
            label = name.upper() if name == "kl" else name
            values = (
                f"{letters[branch]}={_shown(found.values[name], form)}" for branch, found in self.branches.items()
            )
            return f"{label} {' '.join(values)}"

        scores = " ".join(
            f"{name}={_shown(found.score, '.2f')}"
            + (f" ({found.scored} of {found.rows} scored)" if found.scored < found.rows else "")
            for name, found in self.branches.items()
        )
        shown = [(own.name, own.form) for own in OWN_FIGURES if own.name != SCORE]
        shown += [(BETA, ".3g"), *((own.name, own.form) for own in figures)]
        return f"[QuickEval@{self.step}] mode={self.mode} {scores} " + " ".join(each(*one) for one in shown)

    def as_dict(self) -> dict[str, object]:
        """For the record. Without figures of your own it has no entry for them."""
        return {
            "step": self.step,
            "reward": self.reward,
            "branches": {
                name: {"rows": found.rows, "scored": found.scored, **found.values}
                for name, found in self.branches.items()
            },
            "seconds": self.seconds,
            "mode": self.mode,
            **({"figures": dict(self.figures)} if self.figures else {}),
        }

    @classmethod
    def from_dict(cls, record: Record) -> "QuickEvaluation":
        """The inverse of `as_dict`. Other entries of the record are left out."""
        branches = {}
        for name, found in record["branches"].items():
            values = {key: value for key, value in found.items() if key not in ("rows", "scored")}
            branches[name] = BranchFigures(rows=found["rows"], scored=found["scored"], values=values)
        return cls(
            step=record["step"],
            mode=record["mode"],
            reward=record["reward"],
            seconds=record["seconds"],
            branches=branches,
            figures=record.get("figures", {}),
        )


def evaluation_of(
    answers: Sequence[Answered],
    branches: Sequence[str],
    betas: Mapping[str, float],
    step: int,
    seconds: float,
    figures: Sequence[Figure] = (),
) -> QuickEvaluation:
    """The evaluation from its answers.

    `betas`: Coefficient of each branch that has one. `step`: Optimizer steps done. `figures`: figures beside the
    package's own.
    """
    found = {}
    for branch in branches:
        own = [answer for answer in answers if answer.branch == branch]
        values = {figure.name: measure(figure, own) for figure in OWN_FIGURES}
        values[BETA] = betas.get(branch)
        values |= {figure.name: measure(figure, own) for figure in figures}
        scored = sum(each.reward.value is not None for each in own)
        found[branch] = BranchFigures(rows=len(own), scored=scored, values=values)
    return QuickEvaluation(
        step=step,
        reward=mean_reward(answers),
        branches=found,
        seconds=seconds,
        figures={figure.name: measure(figure, answers) for figure in figures},
    )


class QuickEvalHistory:
    """The evaluations of a run, kept in a file that a resumed run goes on with.

    `best`: the figure that selects the best policy. `least_scored`: Share in [0, 1] of a branch's answers that have to
    be scored for its score to be compared.
    """

    def __init__(self, path: Path, best: str | None, least_scored: float) -> None:
        self.path = path
        self._best = best
        self._least_scored = least_scored
        self.evaluations: list[QuickEvaluation] = []
        self.best: QuickEvaluation | None = None

    def resume(self, records: Sequence[Record], step: int) -> None:
        """Go on from a record. Evaluations after `step` are forgotten, because they will be made again."""
        self.evaluations, self.best = [], None
        for record in records:
            if record["step"] <= step:
                self.add(QuickEvaluation.from_dict(record))

    def has(self, step: int) -> bool:
        """Whether there is an evaluation of this step."""
        return any(evaluation.step == step for evaluation in self.evaluations)

    def read(self) -> list[Record]:
        """The record on disk, up to the first line that is not whole."""
        if not self.path.is_file():
            return []
        records: list[Record] = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break  # the run was cut off while it wrote
        return records

    def write(self) -> None:
        """Bring the record on disk up to date."""
        lines = [
            json.dumps({**evaluation.as_dict(), "best": self._best is not None and evaluation is self.best})
            for evaluation in self.evaluations
        ]
        write_whole(self.path, "".join(f"{line}\n" for line in lines))

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
        """Evaluations that no other one beats in one branch without losing in another, in the order of their steps."""
        scores = [evaluation.scores(self._least_scored) for evaluation in self.evaluations]
        return [self.evaluations[index] for index in pareto_front(scores)]

    def front_line(self) -> str:
        """`[Pareto@40] 2 of 4 evaluations on the front: step 20 (fairness 0.40, hallucination 0.52), ...`: the latest
        `SHOWN_ON_FRONT` of them."""
        front = self.front()
        left_out = "..., " if len(front) > SHOWN_ON_FRONT else ""
        shown = left_out + ", ".join(
            f"step {each.step} ("
            + ", ".join(f"{name} {_shown(figures.score, '.2f')}" for name, figures in each.branches.items())
            + ")"
            for each in front[-SHOWN_ON_FRONT:]
        )
        step = self.evaluations[-1].step
        return f"[Pareto@{step}] {len(front)} of {len(self.evaluations)} evaluations on the front: {shown or 'none'}"


def initials(names: Sequence[str]) -> dict[str, str]:
    """The shortest capitalised beginnings that tell names apart: `{"fairness": "F", "hallucination": "H"}`."""
    short = {}
    for name in names:
        others = [other.capitalize() for other in names if other != name]
        length = next(
            (n for n in range(1, len(name)) if not any(o.startswith(name[:n].capitalize()) for o in others)), len(name)
        )
        short[name] = name[:length].capitalize()
    return short


def _shown(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)
