"""The figures of an evaluation: of each policy and mode, and of the second policy against the first.

Owns what is counted, what is too little, and the form of the file. Refuses to own the statistics. Called by
`answering` and `evaluation_text`.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from salesrl_trl.ground.row_statistics import CONFIDENCE, Difference, Mean, difference_of, mean_of
from salesrl_trl.launch.evaluation.held_out import row_means
from salesrl_trl.types import Outcome, Reward, SalesRow

ALL = "all"  # stands for the rows of all branches
GREEDY = "greedy"
LABELS = ("A", "B")  # names of the policies, in the order in which they are given


class Scored(NamedTuple):
    """An answer's reward, its length in tokens, and whether it reached `max_completion_length` without an end."""

    reward: Reward
    tokens: int
    is_truncated: bool


class Mode(NamedTuple):
    """A way to answer, `GREEDY` or `"sampled"`, with so many answers to each row."""

    name: str
    samples: int


def modes(samples: int) -> list[Mode]:
    """Greedily, and sampled so many times if that is more than 0."""
    greedy = Mode(GREEDY, 1)
    return [greedy, Mode("sampled", samples)] if samples else [greedy]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOfRows:
    """The answers of a policy to the rows of a branch, or to all, in one mode."""

    reward: Mean  # over rows
    answers: int
    valid: float  # share of answers that are a valid action, scored or not
    unscored: float  # share of answers whose reward is missing, because a service failed or a judge gave no verdict
    tokens: float  # mean length of an answer
    truncated: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredRow:
    """All answers of a policy, `A` or `B`, in one mode."""

    label: str
    mode: str
    values: Sequence[float]  # mean reward of each row, NaN where too few of its answers could be scored
    groups: Mapping[str, GroupOfRows]  # by branch; `ALL` is first
    missing: Mapping[str, int]  # answers without a reward, by reason code


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationFindings:
    policies: Sequence[str]
    rows: Sequence[SalesRow]
    seed: int
    samples: int
    answered: Sequence[AnsweredRow]  # by policy, then by mode
    differences: Mapping[str, Mapping[str, Difference]]
    """The second policy less the first: mode to branch to difference. Empty for one policy."""
    least: float  # `min_valid_reward_fraction`: the smallest share of rows with a value

    @property
    def lacking(self) -> list[str]:
        """What was scored too little to be judged: `"B greedy fairness: 3 of 64 rows were scored"`. A branch is named
        where its policy's rows as a whole were scored enough."""
        by_branch: dict[str, dict[str, Mean]] = {
            f"{answered.label} {answered.mode}": {name: group.reward for name, group in answered.groups.items()}
            for answered in self.answered
        }
        by_branch |= {f"B - A {mode}": dict(changes) for mode, changes in self.differences.items()}
        return [
            f"{what} {name}: {mean.rows} of {mean.total} rows were scored"
            for what, means in by_branch.items()
            for name, mean in means.items()
            if mean.lacks(self.least) and (name == ALL or not means[ALL].lacks(self.least))
        ]

    def as_dict(self) -> dict[str, object]:
        """Figures and scores for a program. It holds no text of a customer or a policy. A missing value is null."""
        rows = []
        for place, row in enumerate(self.rows):
            rewards: dict[str, dict[str, float | None]] = {}
            for answered in self.answered:
                value = answered.values[place]
                rewards.setdefault(answered.label, {})[answered.mode] = None if math.isnan(value) else value
            rows.append({"row": row.row_id, "branch": row.branch, "rewards": rewards})
        return {
            "policies": dict(zip(LABELS, self.policies, strict=False)),
            "seed": self.seed,
            "samples": self.samples,
            "confidence": CONFIDENCE,
            "min_valid_reward_fraction": self.least,
            "too_few_scored": self.lacking,
            "figures": [
                {
                    "policy": answered.label,
                    "answers": answered.mode,
                    "missing": dict(answered.missing),
                    "branches": {name: asdict(group) for name, group in answered.groups.items()},
                }
                for answered in self.answered
            ],
            "differences": {
                mode: {name: {**asdict(change), "equal": change.equal} for name, change in by_branch.items()}
                for mode, by_branch in self.differences.items()
            },
            "rows": rows,
        }


def findings_of(
    policies: Sequence[str], rows: Sequence[SalesRow], branches: Sequence[str], modes: Sequence[Mode],
    answers: Sequence[Sequence[Sequence[Scored]]], *, seed: int, least: float,
) -> EvaluationFindings:  # fmt: skip
    """The figures of an evaluation of one or two `policies`, from the answers of each in each of the `modes` to all
    `rows`. A mean or a difference counts if the share `least` of its rows has a value."""
    places = {ALL: list(range(len(rows)))}
    places |= {branch: [place for place, row in enumerate(rows) if row.branch == branch] for branch in branches}
    places = {name: of_branch for name, of_branch in places.items() if of_branch}
    answered = [
        _answered(label, mode, scored, places)
        for label, of_policy in zip(LABELS, answers, strict=False)
        for mode, scored in zip(modes, of_policy, strict=True)
    ]
    differences = {}
    if len(policies) > 1:
        for first, second in zip(answered[: len(modes)], answered[len(modes) :], strict=True):
            differences[first.mode] = {
                name: difference_of([first.values[n] for n in of_branch], [second.values[n] for n in of_branch])
                for name, of_branch in places.items()
            }
    return EvaluationFindings(
        policies=policies, rows=rows, seed=seed, samples=sum(mode.samples for mode in modes if mode.name != GREEDY),
        answered=answered, differences=differences, least=least,
    )  # fmt: skip


def _answered(label: str, mode: Mode, scored: Sequence[Scored], places: Mapping[str, Sequence[int]]) -> AnsweredRow:
    rewards = [answer.reward.value for answer in scored]
    values = row_means([math.nan if reward is None else reward for reward in rewards], mode.samples)
    by_row = [scored[first : first + mode.samples] for first in range(0, len(scored), mode.samples)]
    groups = {}
    for name, of_branch in places.items():
        answers = [answer for place in of_branch for answer in by_row[place]]
        count = len(answers)
        groups[name] = GroupOfRows(
            reward=mean_of([values[place] for place in of_branch]),
            answers=count,
            valid=sum(answer.reward.outcome is not Outcome.INVALID_ACTION for answer in answers) / count,
            unscored=sum(answer.reward.value is None for answer in answers) / count,
            tokens=sum(answer.tokens for answer in answers) / count,
            truncated=sum(answer.is_truncated for answer in answers) / count,
        )
    missing = dict(sorted(Counter(answer.reward.reason for answer in scored if answer.reward.value is None).items()))
    return AnsweredRow(label=label, mode=mode.name, values=values, groups=groups, missing=missing)
