"""Judge noise: how far verdicts on the same answer vary by chance and by the order of the two answers.

The preflight requests verdicts on a small set of answers from right to wrong. Pure.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from salesrl_trl.types import NOTHING_WRITTEN, Action, ActionFormat, Answer, Message, SalesRow

ORDERS = (True, False)  # the candidate first, and second
MIN_REPEATS = 2  # fewest verdicts on the same input to measure a spread
MIN_CALLS = 4 * len(ORDERS) * MIN_REPEATS  # fewest verdicts on a conversation's 4 answers


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedSample:
    rubric: str
    row: SalesRow
    action: Action
    candidate: Answer
    reference: Answer
    candidate_first: bool

    @property
    def answer(self) -> tuple[str, str, str]:
        """Answers with the same rubric and conversation are compared, like a group of completions in training."""
        return self.rubric, self.row.row_id, self.candidate.text


def samples(
    rubrics: Mapping[str, str], action_format: ActionFormat | None, calls: int, *, of_groups: bool = False
) -> list[list[JudgedSample]]:
    """Samples to judge, by call: each answer in both orders, at least twice, with at most `calls` and at least
    `MIN_CALLS` calls. `rubrics` maps each rubric to a branch that uses it; few calls cover only some rubrics. Without
    an `action_format` the policy answers directly. With `of_groups`, each call covers all answers to a conversation,
    and `candidate_first` is whether a candidate is in the first half, before the reference."""
    noise_set = resources.files(__package__).joinpath("noise_set.json")
    talks = json.loads(noise_set.read_text(encoding="utf-8"))  # with answers from right to wrong
    size, turns = len(talks[0]["answers"]), len(talks)
    calls, per_call = (calls * size, size) if of_groups else (calls, 1)
    pairs = [(name, (at + turn) % turns) for turn in range(turns) for at, name in enumerate(rubrics)]
    inputs = []
    for name, number in pairs[: max(calls // MIN_CALLS, 1)]:
        talk = talks[number]
        row = SalesRow(
            row_id=f"noise-{number}",
            branch=rubrics[name],
            conversation=tuple(Message(role=role, content=content) for role, content in talk["conversation"]),
            documents=(talk["document"],),
        )
        reference = Answer(text=talk["reference"], passages=(), took_ms=0.0)
        for first in ORDERS:
            call = []
            for place, written in enumerate(talk["answers"]):
                action = NOTHING_WRITTEN if action_format is None else _action(written, action_format)
                candidate = Answer(text=written["answer"], passages=(), took_ms=0.0)
                is_first = first == (2 * place < size) if of_groups else first
                call.append(JudgedSample(rubric=name, row=row, action=action, candidate=candidate, reference=reference,
                                         candidate_first=is_first))  # fmt: skip
            inputs += [call] if of_groups else [[sample] for sample in call]
    return inputs * (calls // per_call // len(inputs))


def _action(written: Mapping[str, str], action_format: ActionFormat) -> Action:
    others = [name for name in action_format.fields if name != action_format.query]
    texts = zip(others, (written["profile"], written["summary"]), strict=False)
    fields = dict.fromkeys(action_format.fields, "") | dict(texts) | {action_format.query: written["query"]}
    return Action(fields=fields, query_field=action_format.query)


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """A judge's noise in units of its score. A value is `None` with too few verdicts."""

    repeat_sd: float | None  # standard deviation of verdicts on one answer in one order
    verdict_sd: float | None
    """Standard deviation of verdicts on one answer in both orders: a verdict's noise in training."""
    order_gap: float | None  # mean score difference of the same candidates shown first and shown second
    order_gap_error: float | None  # standard error of the gap
    spread_sd: float | None  # noise-free standard deviation of a conversation's answers

    def share(self, repeats: int = 1) -> float | None:
        """The share of noise in the variance of a group's scores, each the mean of `repeats` verdicts. An even number
        uses both orders equally, which cancels order bias.

            share = noise^2 / (noise^2 + spread^2),    noise^2 = sd^2 / repeats
        """
        if self.verdict_sd is None or self.repeat_sd is None or self.spread_sd is None:
            return None
        noise = (self.verdict_sd if repeats % 2 else self.repeat_sd) ** 2 / repeats
        total = noise + self.spread_sd**2
        return noise / total if total else None


def noise_of(scored: Iterable[tuple[JudgedSample, float]]) -> Noise:
    """The noise of scored samples. Invalid verdicts are excluded."""
    inputs = defaultdict[tuple[tuple[str, str, str], bool], list[float]](list)
    answers = defaultdict[tuple[str, str, str], list[float]](list)
    means = defaultdict[tuple[str, str], list[float]](list)
    for sample, score in scored:
        inputs[sample.answer, sample.candidate_first].append(score)
        answers[sample.answer].append(score)
    for (rubric, row, _), scores in answers.items():
        means[rubric, row].append(statistics.fmean(scores))
    gaps = [
        statistics.fmean(inputs[answer, True]) - statistics.fmean(inputs[answer, False])
        for answer in answers
        if inputs.get((answer, True)) and inputs.get((answer, False))
    ]
    verdict_sd = _pooled_sd(answers.values())
    spread = _pooled_sd(means.values())
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
    several = [group for group in groups if len(group) > 1]
    if not several:
        return None
    squares = sum((len(group) - 1) * statistics.variance(group) for group in several)
    return math.sqrt(squares / sum(len(group) - 1 for group in several))
