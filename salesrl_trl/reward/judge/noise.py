"""How far the verdicts of a judge differ on the same answer: by chance, and by the order of the two answers.

Owns a small set of answers from right to wrong, which verdicts are asked for, and the figures from their scores.
Refuses to ask a judge. Pure: no network.
"""

import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TypedDict

from salesrl_trl.types import Action, ActionFormat, Answer, Message, SalesRow

ORDERS = (True, False)
"""The candidate first, and second."""
MIN_REPEATS = 2
"""Verdicts on the same input: one alone has no spread."""
MIN_ANSWERS = 2
MIN_CALLS = MIN_ANSWERS * len(ORDERS) * MIN_REPEATS
"""Fewest verdicts that show noise, order and spread."""


class _Written(TypedDict):
    profile: str
    query: str
    summary: str
    answer: str


class _Conversation(TypedDict):
    conversation: list[tuple[str, str]]
    document: str
    reference: str
    answers: list[_Written]
    """From right to wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedSample:
    """One verdict to ask for."""

    rubric: str
    row: SalesRow
    action: Action
    candidate: Answer
    reference: Answer
    candidate_first: bool

    @property
    def group(self) -> tuple[str, str]:
        """The answers that are compared: one rubric and one conversation, as a group of completions in training."""
        return self.rubric, self.row.row_id

    @property
    def answer(self) -> tuple[str, str, str]:
        """The answer to score, in either order."""
        return *self.group, self.candidate.text


def samples(rubrics: Mapping[str, str], action_format: ActionFormat, calls: int) -> list[JudgedSample]:
    """The verdicts to ask for: each answer in both orders, at least twice.

    `rubrics` has the name of each rubric, to a branch that is judged by it. `calls` is the most verdicts, at least
    `MIN_CALLS`. With few calls some rubrics or answers are left out.
    """
    talks: list[_Conversation] = json.loads(
        resources.files(__package__).joinpath("noise_set.json").read_text(encoding="utf-8")
    )
    size = len(talks[0]["answers"])
    turns = len(talks)
    pairs = [(name, (at + turn) % turns) for turn in range(turns) for at, name in enumerate(rubrics)]
    chosen = pairs[: max(calls // (size * len(ORDERS) * MIN_REPEATS), 1)]
    answers = min(size, calls // (len(ORDERS) * MIN_REPEATS * len(chosen)))
    repeats = calls // (len(ORDERS) * len(chosen) * answers)
    return [
        _sample(talks[number], number, written, name, rubrics[name], action_format, candidate_first)
        for _ in range(repeats)
        for name, number in chosen
        for written in _spaced(talks[number]["answers"], answers)
        for candidate_first in ORDERS
    ]


def _spaced(answers: Sequence[_Written], count: int) -> list[_Written]:
    """`count` of the answers, the best and the worst among them."""
    return [answers[round(at * (len(answers) - 1) / (count - 1))] for at in range(count)]


def _sample(
    talk: _Conversation,
    number: int,
    written: _Written,
    rubric: str,
    branch: str,
    action_format: ActionFormat,
    candidate_first: bool,
) -> JudgedSample:
    others = [name for name in action_format.fields if name != action_format.query]
    texts = zip(others, (written["profile"], written["summary"]), strict=False)
    fields = dict.fromkeys(action_format.fields, "") | dict(texts) | {action_format.query: written["query"]}
    return JudgedSample(
        rubric=rubric,
        row=SalesRow(
            row_id=f"noise-{number}",
            branch=branch,
            conversation=tuple(Message(role=role, content=content) for role, content in talk["conversation"]),
            documents=(talk["document"],),
        ),
        action=Action(fields=fields, query_field=action_format.query),
        candidate=Answer(text=written["answer"], passages=(), took_ms=0.0),
        reference=Answer(text=talk["reference"], passages=(), took_ms=0.0),
        candidate_first=candidate_first,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """The noise of a judge, in units of its score. A figure is `None` where there are too few verdicts."""

    repeat_sd: float | None
    """Standard deviation of the verdicts on one input: one answer in one order."""
    verdict_sd: float | None
    """Standard deviation of the verdicts on one answer in both orders: the noise of a verdict in training."""
    order_gap: float | None
    """Mean score of candidates that stood first, less that of the same ones that stood second."""
    order_gap_error: float | None
    """Standard error of the gap."""
    spread_sd: float | None
    """Standard deviation of the answers of one conversation, without the noise."""

    def share(self, repeats: int = 1) -> float | None:
        """The share of noise in the variance of a group's scores, each the mean of so many verdicts. An even number
        has each order equally often, so that the order cancels out.

            share = noise^2 / (noise^2 + spread^2),    noise^2 = sd^2 / repeats
        """
        if self.verdict_sd is None or self.repeat_sd is None or self.spread_sd is None:
            return None
        noise = (self.verdict_sd if repeats % 2 else self.repeat_sd) ** 2 / repeats
        total = noise + self.spread_sd**2
        return noise / total if total else None


def noise_of(scored: Iterable[tuple[JudgedSample, float]]) -> Noise:
    """The figures of some verdicts: samples with the score of their candidate. Invalid verdicts are left out."""
    inputs: dict[tuple[tuple[str, str, str], bool], list[float]] = defaultdict(list)
    answers: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    groups: dict[tuple[str, str], dict[tuple[str, str, str], list[float]]] = defaultdict(dict)
    for sample, score in scored:
        inputs[sample.answer, sample.candidate_first].append(score)
        answers[sample.answer].append(score)
        groups[sample.group][sample.answer] = answers[sample.answer]
    gaps = [
        statistics.fmean(inputs[answer, True]) - statistics.fmean(inputs[answer, False])
        for answer in answers
        if inputs.get((answer, True)) and inputs.get((answer, False))
    ]
    verdict_sd = _pooled_sd(answers.values())
    means = [[statistics.fmean(scores) for scores in group.values()] for group in groups.values()]
    spread = _pooled_sd(means)
    if spread is not None and verdict_sd is not None:
        of_means = verdict_sd**2 * statistics.fmean(1 / len(scores) for scores in answers.values())
        spread = math.sqrt(max(spread**2 - of_means, 0.0))
    return Noise(
        repeat_sd=_pooled_sd(inputs.values()),
        verdict_sd=verdict_sd,
        order_gap=statistics.fmean(gaps) if gaps else None,
        order_gap_error=statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else None,
        spread_sd=spread,
    )


def _pooled_sd(groups: Iterable[Sequence[float]]) -> float | None:
    """The standard deviation inside the groups; `None` if no group has two values."""
    several = [group for group in groups if len(group) > 1]
    if not several:
        return None
    squares = sum((len(group) - 1) * statistics.variance(group) for group in several)
    return math.sqrt(squares / sum(len(group) - 1 for group in several))


def widest_gap(scored: Mapping[str, Sequence[tuple[JudgedSample, float]]]) -> float | None:
    """The largest difference between the mean scores of two judges, over the answers that both scored."""
    means = [
        {
            answer: statistics.fmean(score for sample, score in each if sample.answer == answer)
            for answer in {sample.answer for sample, _ in each}
        }
        for each in scored.values()
    ]
    gaps = [
        abs(statistics.fmean(one[answer] - other[answer] for answer in one.keys() & other.keys()))
        for one, other in itertools.combinations(means, 2)
        if one.keys() & other.keys()
    ]
    return max(gaps, default=None)
