"""Quick evaluations: a fixed held-out sample, answered greedily every few steps.

Owns their figures, the line that tells them, their record on disk, which of them are on the Pareto front of the
branches, and which is the best so far. How completions are made and scored is the trainer's.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from salesrl_trl.evaluation.pareto import pareto_front
from salesrl_trl.names import REWARD

SHOWN_ON_FRONT = 5
"""Evaluations on the front that a line names: the latest."""
OVERALL = REWARD
WORST_BRANCH = "worst_branch"
"""The score of the branch that does worst: what is raised when no branch is to pay for another."""
COLUMNS = ("branch", "score", "truncated", "length", "kl", "kl_tokens")
"""Of the table in which completions travel between ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickEvalSettings:
    """When and on how much: `QuickEvalSettings(steps=20, rows=16, best="worst_branch")`."""

    steps: int = 0
    """Optimizer steps from one to the next; 0 for none."""
    rows: int = 16
    """Held-out rows, spread evenly over the branches."""
    best: str | None = None
    """What the best policy is the best by: `reward`, `worst_branch` or a branch's name; `None` keeps none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchFigures:
    """One branch in one evaluation. What could not be measured is `None`."""

    rows: int
    """Completions."""
    scored: int
    """Those of them that could be scored."""
    score: float | None
    """Mean reward of those."""
    truncated: float | None
    """Share that came to `max_completion_length` without an end."""
    length: float | None
    """Mean tokens of a completion."""
    kl: float | None
    """Nats per token to the reference policy, as the loss estimates it, along the greedy answers."""
    beta: float | None
    """Coefficient at the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickEvaluation:
    """One evaluation."""

    step: int
    """Optimizer steps before it."""
    reward: float | None
    """Mean reward of all completions that could be scored."""
    branches: Mapping[str, BranchFigures]
    """By name, in the order of the settings."""
    seconds: float
    """What it took."""
    mode: str = "greedy"
    """How completions were chosen."""

    def score(self, by: str, least_scored: float = 0.0) -> float | None:
        """The figure the best policy is the best by; `None` where it could not be measured, or less than a share of
        the completions it is about could be scored: a few that were lucky are no evaluation."""
        about = [figures for name, figures in self.branches.items() if by in (name, WORST_BRANCH, OVERALL)]
        about = [figures for figures in about if figures.rows]
        scores = [figures.score for figures in about if figures.scored >= least_scored * figures.rows]
        known = [score for score in scores if score is not None]
        if not known or len(known) < len(about):
            return None
        return self.reward if by == OVERALL else min(known)

    def scores(self, least_scored: float) -> dict[str, float | None]:
        """By branch, to be compared with other evaluations; `None` as in `score`."""
        return {name: self.score(name, least_scored) for name in self.branches}

    def line(self) -> str:
        """`[QuickEval@20] mode=greedy fairness=0.41 ... truncated F=0% ... length F=28 ... KL F=0.12 ... beta
        F=0.05`."""
        letters = initials(list(self.branches))

        def each(what: str, form: str) -> str:
            return " ".join(
                f"{letters[name]}={_shown(getattr(figures, what), form)}" for name, figures in self.branches.items()
            )

        scores = " ".join(
            f"{name}={_shown(figures.score, '.2f')}"
            + (f" ({figures.scored} of {figures.rows} scored)" if figures.scored < figures.rows else "")
            for name, figures in self.branches.items()
        )
        return (
            f"[QuickEval@{self.step}] mode={self.mode} {scores} truncated {each('truncated', '.0%')} "
            f"length {each('length', '.0f')} KL {each('kl', '.3f')} beta {each('beta', '.3g')}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "QuickEvaluation":
        """The inverse of `as_dict`; what the record says beside it is left out."""
        return cls(
            step=record["step"],
            mode=record["mode"],
            reward=record["reward"],
            seconds=record["seconds"],
            branches={name: BranchFigures(**figures) for name, figures in record["branches"].items()},
        )


def evaluation_of(
    table: torch.Tensor, branches: Sequence[str], betas: Mapping[str, float], step: int, seconds: float
) -> QuickEvaluation:
    """The evaluation from its completions.

    Args:
        table (`torch.Tensor`):
            Shape (N, len(`COLUMNS`)): branch id, reward (NaN where it could not be scored), 1 if truncated, tokens,
            sum of the KL over tokens and tokens in it, NaN and 0 without a reference policy.
        branches (`Sequence[str]`):
            Branch names by id.
        betas (`Mapping[str, float]`):
            Coefficient by branch, where there is one.
        step (`int`):
            Optimizer steps done.
        seconds (`float`):
            What it took.
    """
    figures = {}
    for branch_id, branch in enumerate(branches):
        rows = table[table[:, 0] == branch_id]  # (n, columns)
        _, scores, truncated, lengths, kls, tokens = rows.unbind(dim=1)  # each (n,)
        total = tokens.sum().item()
        figures[branch] = BranchFigures(
            rows=len(rows),
            scored=int((~torch.isnan(scores)).sum().item()),
            score=_mean(scores),
            truncated=_mean(truncated),
            length=_mean(lengths),
            kl=_finite(kls.sum().item() / total) if total else None,
            beta=betas.get(branch),
        )
    return QuickEvaluation(step=step, reward=_mean(table[:, 1]), branches=figures, seconds=seconds)


class QuickEvalHistory:
    """The evaluations of a run, with the best of them.

    Args:
        path (`Path`):
            The record.
        best (`str`, *optional*):
            What the best is the best by.
        least_scored (`float`):
            Share in [0, 1] of a branch's completions that have to be scored for its score to be compared.
    """

    def __init__(self, path: Path, best: str | None, least_scored: float) -> None:
        self._path = path
        self._best = best
        self._least_scored = least_scored
        self.evaluations: list[QuickEvaluation] = []
        self.best: QuickEvaluation | None = None

    def resume(self, records: Sequence[Mapping[str, Any]], step: int) -> None:
        """Go on from a record; what was evaluated after `step` is forgotten, for it will be again."""
        self.evaluations, self.best = [], None
        for record in records:
            if record["step"] <= step:
                self.add(QuickEvaluation.from_dict(record))

    def has(self, step: int) -> bool:
        """Whether there is an evaluation of this step."""
        return any(each.step == step for each in self.evaluations)

    def read(self) -> list[dict[str, Any]]:
        """The record on disk, as far as its lines are whole."""
        if not self._path.is_file():
            return []
        records = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break  # a run that was cut off while it wrote
        return records

    def write(self) -> None:
        """Bring the record on disk up to date."""
        lines = [
            json.dumps({**each.as_dict(), "best": self._best is not None and each is self.best})
            for each in self.evaluations
        ]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".new")
        fresh.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        fresh.replace(self._path)  # a run that is cut off leaves the one or the other, whole

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
        scores = [each.scores(self._least_scored) for each in self.evaluations]
        return [self.evaluations[index] for index in pareto_front(scores)]

    def front_line(self) -> str:
        """`[Pareto@40] 2 of 4 evaluations on the front: step 20 (fairness 0.40, hallucination 0.52), ...`: the latest
        `SHOWN_ON_FRONT` of them."""
        front = self.front()
        left_out = "..., " if len(front) > SHOWN_ON_FRONT else ""
        told = left_out + ", ".join(
            f"step {each.step} ("
            + ", ".join(f"{name} {_shown(figures.score, '.2f')}" for name, figures in each.branches.items())
            + ")"
            for each in front[-SHOWN_ON_FRONT:]
        )
        step = self.evaluations[-1].step
        return f"[Pareto@{step}] {len(front)} of {len(self.evaluations)} evaluations on the front: {told or 'none'}"


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


def spread(branch_ids: Sequence[int], rows: int, branches: int, multiple: int) -> list[int]:
    """Which rows to evaluate: the first of each branch in turn, a multiple of the number of processes and at least one
    for each.

    Args:
        branch_ids (`Sequence[int]`):
            Of each held-out row.
        rows (`int`):
            How many are wanted.
        branches (`int`):
            How many branches there are.
        multiple (`int`):
            Processes that share the work.

    Returns:
        `list[int]`: indices; as many as there are where there are too few.
    """
    by_branch = [[index for index, each in enumerate(branch_ids) if each == branch] for branch in range(branches)]
    turns = max((len(each) for each in by_branch), default=0)
    chosen = [each[turn] for turn in range(turns) for each in by_branch if turn < len(each)]
    return chosen[: min(max(rows, multiple), len(chosen)) // multiple * multiple]


def _mean(values: torch.Tensor) -> float | None:
    known = values[~torch.isnan(values)]
    return known.mean().item() if len(known) else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _shown(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)
