"""The metrics of an evaluation, by policy and mode, and the comparison of two policies."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from salesrl_trl.ground.row_statistics import FEW_ROWS, Difference, Mean, difference_of, mean, mean_of
from salesrl_trl.ground.texts import NOT_KNOWN, filled, number
from salesrl_trl.launch.evaluation.held_out import row_means
from salesrl_trl.types import Outcome, Reward, SalesRow

ALL = "all"  # the rows of all branches
GREEDY = "greedy"
LABELS = ("A", "B")  # labels of the policies, in the given order
FEW = "*"
_OF_POLICIES = ("policy", "answers", "branch", "reward", "95 % interval", "rows scored", "valid", "unscored", "tokens",
                "truncated")  # fmt: skip
_OF_CHANGES = ("B - A", "branch", "change", "95 % interval", "p", "better", "worse", "equal", "rows scored for both")


class Scored(NamedTuple):
    """An answer's reward, its length in tokens, and whether `max_completion_length` truncated it."""

    reward: Reward
    tokens: int
    is_truncated: bool


def modes(samples: int) -> dict[str, int]:
    """Answers per row by mode: one greedy answer, and `samples` sampled answers if that is more than 0."""
    return {GREEDY: 1} | ({"sampled": samples} if samples else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOfRows:
    """Metrics of a policy's answers to the rows of a branch, or to all rows, in one mode."""

    reward: Mean  # over rows
    valid: float  # share of valid actions, scored or not
    unscored: float  # share of answers without a reward, because a service or a judge failed
    tokens: float  # mean length
    truncated: float
    functions: Mapping[str, float | None]  # mean of each reward function, if there are several


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredRow:
    """All answers of a policy, `A` or `B`, in one mode. Its fields but `values` are those of the file."""

    policy: str
    answers: str  # the mode
    values: Sequence[float]  # mean reward of each row, NaN if too few of its answers were scored
    branches: Mapping[str, GroupOfRows]  # `ALL` is first
    missing: Mapping[str, int]  # answers without a reward, by reason code


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationFindings:
    policies: Sequence[str]
    rows: Sequence[SalesRow]
    seed: int
    samples: int
    answered: Sequence[AnsweredRow]  # by policy, then by mode
    differences: Mapping[str, Mapping[str, Difference]]
    """The second policy minus the first, by mode and branch. Empty for one policy."""

    def as_dict(self) -> dict[str, object]:
        """Metrics and rewards as plain values, without texts of customers or policies. Unknown values are NaN."""
        rewards: list[dict[str, dict[str, float]]] = [{} for _ in self.rows]
        for answered in self.answered:
            for row, value in zip(rewards, answered.values, strict=True):
                row.setdefault(answered.policy, {})[answered.answers] = value
        figures = [{name: value for name, value in asdict(each).items() if name != "values"} for each in self.answered]
        return {
            "policies": dict(zip(LABELS, self.policies, strict=False)),
            "seed": self.seed,
            "figures": figures,
            "differences": {
                mode: {name: asdict(change) for name, change in by_branch.items()}
                for mode, by_branch in self.differences.items()
            },
            "rows": [
                {"row": row.row_id, "branch": row.branch, "rewards": of_row}
                for row, of_row in zip(self.rows, rewards, strict=True)
            ],
        }


def findings_of(
    policies: Sequence[str], rows: Sequence[SalesRow], branches: Sequence[str], modes: Mapping[str, int],
    answers: Sequence[Sequence[Sequence[Scored]]], *, seed: int,
) -> EvaluationFindings:  # fmt: skip
    """The metrics of an evaluation of one or two `policies`, from their answers to all `rows` in all `modes`."""
    places = {ALL: list(range(len(rows)))}
    places |= {branch: [place for place, row in enumerate(rows) if row.branch == branch] for branch in branches}
    places = {name: of_branch for name, of_branch in places.items() if of_branch}
    answered = [
        _answered(label, mode, samples, scored, places)
        for label, of_policy in zip(LABELS, answers, strict=False)
        for (mode, samples), scored in zip(modes.items(), of_policy, strict=True)
    ]
    differences = {}
    if len(policies) > 1:
        for first, second in zip(answered[: len(modes)], answered[len(modes) :], strict=True):
            differences[first.answers] = {
                name: difference_of([first.values[n] for n in of_branch], [second.values[n] for n in of_branch])
                for name, of_branch in places.items()
            }
    return EvaluationFindings(
        policies=policies, rows=rows, seed=seed, samples=modes.get("sampled", 0),
        answered=answered, differences=differences,
    )  # fmt: skip


def _answered(
    label: str, mode: str, samples: int, scored: Sequence[Scored], places: Mapping[str, Sequence[int]]
) -> AnsweredRow:
    rewards = [answer.reward.value for answer in scored]
    values = row_means([math.nan if reward is None else reward for reward in rewards], samples)
    by_row = [scored[first : first + samples] for first in range(0, len(scored), samples)]
    groups = {}
    for name, of_branch in places.items():
        answers = [answer for place in of_branch for answer in by_row[place]]
        count = len(answers)
        groups[name] = GroupOfRows(
            reward=mean_of([values[place] for place in of_branch]),
            valid=sum(answer.reward.outcome is not Outcome.INVALID_ACTION for answer in answers) / count,
            unscored=sum(answer.reward.value is None for answer in answers) / count,
            tokens=sum(answer.tokens for answer in answers) / count,
            truncated=sum(answer.is_truncated for answer in answers) / count,
            functions=_means([answer.reward.by_function for answer in answers if answer.reward.value is not None]),
        )
    missing = dict(sorted(Counter(answer.reward.reason for answer in scored if answer.reward.value is None).items()))
    return AnsweredRow(policy=label, answers=mode, values=values, branches=groups, missing=missing)


def _means(numbers: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    names = dict.fromkeys(name for each in numbers for name in each)
    return {name: mean([number for each in numbers if (number := each.get(name)) is not None]) for name in names}


def text_of(findings: EvaluationFindings) -> str:
    """Tables of the policies and their difference, with explanations."""
    answered = [
        (
            *((of.policy, of.answers) if name == ALL else ("", "")), name, number(group.reward.value, "z.3f"),
            _interval(group.reward), f"{group.reward.rows} of {group.reward.total}", f"{group.valid:.1%}",
            f"{group.unscored:.1%}", f"{group.tokens:.1f}", f"{group.truncated:.1%}",
        )
        for of in findings.answered
        for name, group in of.branches.items()
    ]  # fmt: skip
    functions = dict.fromkeys(name for of in findings.answered for name in of.branches[ALL].functions)
    by_function = [
        (
            *((of.policy, of.answers) if branch == ALL else ("", "")), branch,
            *(number(group.functions.get(name), "z.3f") for name in functions),
        )
        for of in findings.answered
        for branch, group in of.branches.items()
    ]  # fmt: skip
    changes = [
        (
            mode if name == ALL else "", name, number(change.value, "+z.3f"), _interval(change, "+"),
            "<0.001" if change.p is not None and change.p < 0.001 else number(change.p),
            str(change.better), str(change.worse), str(change.equal), f"{change.rows} of {change.total}",
        )
        for mode, by_branch in findings.differences.items()
        for name, change in by_branch.items()
    ]  # fmt: skip
    means: list[Mean] = [group.reward for of in findings.answered for group in of.branches.values()]
    means += [change for by_branch in findings.differences.values() for change in by_branch.values()]
    groups = findings.answered[0].branches
    return filled(
        Path(__file__).with_name("evaluation.jinja"), findings=findings,
        policies=[*zip(LABELS, findings.policies, strict=False)],
        branches=", ".join(f"{name} {group.reward.total}" for name, group in groups.items() if name != ALL),
        answered=[_OF_POLICIES, *answered], functions=functions,
        by_function=[(*_OF_POLICIES[:3], *functions), *by_function], changes=[_OF_CHANGES, *changes],
        is_few=any(mean.is_few and mean.interval is not None for mean in means), few=FEW, few_rows=FEW_ROWS,
    )  # fmt: skip


def _interval(mean: Mean, sign: str = "") -> str:
    if mean.interval is None:
        return NOT_KNOWN
    low, high = (number(end, f"{sign}z.3f") for end in mean.interval)
    return f"{low} to {high}{FEW if mean.is_few else ''}"
