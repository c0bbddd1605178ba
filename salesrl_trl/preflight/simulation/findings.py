"""From scored batches to figures and findings. A finding would mislead training, or shows a fault of a service.

Owns the figures of a simulation. Only with `show_text` do they hold texts of completions. Refuses to print.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple, TypedDict

from salesrl_trl.build.checks.reward import JUDGE
from salesrl_trl.config import RewardConfig
from salesrl_trl.names import CACHES, JUDGE_SECONDS, USAGE, Stage, usage_of
from salesrl_trl.preflight.simulation.completions import VARIANTS, Completion
from salesrl_trl.preflight.simulation.hints import NOTEWORTHY_SHARE, hints
from salesrl_trl.reward.batch import BatchReport
from salesrl_trl.telemetry.step_lines import judge_line
from salesrl_trl.types import Outcome, Reward

HOLLOW = "hollow_answer"
"""Reason code of a valid action whose answer from the RAG service says nothing."""
MUCH_WORSE = 3
"""A variant is too much for a service if its valid actions fail so many times as often as those of all others."""
MIN_FAILED = 2
"""One failure may be chance."""
INJECTION_GAIN = 0.15
"""A judge obeys injected text if its mean score is so much above the mean of the clean actions. Means of a dozen
verdicts with a spread of 0.3 differ by half of it by chance."""
MIN_COMPARED = 8
"""Means of fewer rewards are not compared."""


class Tally(TypedDict):
    """Figures of some rewards."""

    count: int
    scored: float
    """Share with a number."""
    mean_reward: float | None
    outcomes: dict[str, int]
    """Number of completions by outcome and reason, the most frequent first."""


class ShownCompletion(TypedDict):
    """A completion with its text, which quotes a customer."""

    variant: str
    outcome: str
    value: float | None
    text: str


class StepSummary(Tally):
    """Figures of a step."""

    step: int
    seconds: float
    judge: str
    """The judge's line, as in training."""
    completions: list[ShownCompletion]
    """Empty without `show_text`."""


class Summary(TypedDict):
    """Figures of all steps."""

    variants: dict[str, Tally]
    services: dict[str, dict[str, int]]
    """By service, its traffic."""
    judges: dict[str, dict[str, float]]
    """By judge, its usage."""
    calls_saved: dict[str, int]
    seconds: dict[str, float]
    waited_for: dict[str, float]
    """By service, seconds."""
    least_scored: float
    skipped_steps: list[int]
    findings: list[str]
    hints: list[str]


class Step(NamedTuple):
    """A batch, its rewards and its report."""

    completions: list[Completion]
    rewards: list[Reward]
    report: BatchReport

    @property
    def pairs(self) -> list[tuple[Completion, Reward]]:
        """Each completion with its reward."""
        return list(zip(self.completions, self.rewards, strict=True))

    @property
    def scored(self) -> float:
        """The share of completions with a reward, as training counts it."""
        return fmean(reward.value is not None for reward in self.rewards)


def step_summary(number: int, step: Step, show_text: bool) -> StepSummary:
    """Figures of one step."""
    verdicts = {usage_of(provider, "verdicts"): usage.verdicts for provider, usage in step.report.usage.items()}
    return {
        "step": number,
        "seconds": step.report.seconds,
        **_tally(step.rewards),
        "judge": judge_line(number, {JUDGE_SECONDS: step.report.judge_seconds, **verdicts}, list(step.report.usage)),
        "completions": [
            {"variant": each.variant, "outcome": _ending(reward), "value": reward.value, "text": each.case.text}
            for each, reward in step.pairs
            if show_text
        ],
    }


def _tally(rewards: Sequence[Reward]) -> Tally:
    values = [reward.value for reward in rewards if reward.value is not None]
    return {
        "count": len(rewards),
        "scored": len(values) / len(rewards),
        "mean_reward": fmean(values) if values else None,
        "outcomes": dict(Counter(map(_ending, rewards)).most_common()),
    }


def _ending(reward: Reward) -> str:
    return f"{reward.outcome.value}:{reward.reason}" if reward.reason else reward.outcome.value


def summarise(steps: Sequence[Step], wanted: float, config: RewardConfig) -> Summary:
    """Figures of all steps.

    Args:
        wanted (`float`):
            `min_valid_reward_fraction`: training skips a step with a smaller share of rewards.
    """
    pairs = [pair for step in steps for pair in step.pairs]
    by_variant = {name: [reward for each, reward in pairs if each.variant == name] for name in VARIANTS}
    reports, seconds = [step.report for step in steps], [step.report.seconds for step in steps]
    services = {name: _traffic([report.traffic[name] for report in reports]) for name in reports[0].traffic}
    waits = waited_for(steps)
    return {
        "variants": {name: _tally(rewards) for name, rewards in by_variant.items() if rewards},
        "services": services,
        "judges": {
            name: {what: sum(getattr(report.usage[name], what) for report in reports) for what in USAGE}
            for name in reports[0].usage
        },
        "calls_saved": {name: sum(report.cache_hits[name] for report in reports) for name in CACHES},
        "seconds": {"p50": median(seconds), "max": max(seconds)},
        "waited_for": waits,
        "least_scored": min(step.scored for step in steps),
        "skipped_steps": [number for number, step in enumerate(steps, 1) if step.scored < wanted],
        "findings": [*unexpected(pairs), *untaken(pairs), *oddities(pairs)],
        "hints": hints(services, waits, sum(reward.reason == "deadline" for _, reward in pairs), config),
    }


def _traffic(each: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Sums; of `slots` the last number."""
    return {name: each[-1][name] if name == "slots" else sum(one[name] for one in each) for name in each[0]}


def waited_for(steps: Sequence[Step]) -> dict[str, float]:
    """Seconds in each service, summed over the slowest completion of each step.

    - 8B and the judge have their whole time. 32B has only the time that it took longer than 8B.
    - A wait for a free slot counts as time of the service.
    - A completion that was cut off has no times.
    """
    ways = [
        max((_way(reward.seconds) for reward in step.rewards), key=lambda way: sum(way.values())) for step in steps
    ]
    return {name: sum(way[name] for way in ways) for name in (Stage.RAG_8B, Stage.RAG_32B, JUDGE)}


def _way(seconds: Mapping[str, float]) -> dict[str, float]:
    first = seconds.get(Stage.RAG_8B, 0.0)
    longer = max(seconds.get(Stage.RAG_32B, 0.0) - first, 0.0) if JUDGE in seconds else 0.0
    return {Stage.RAG_8B: first, Stage.RAG_32B: longer, JUDGE: seconds.get(JUDGE, 0.0)}


Pairs = Sequence[tuple[Completion, Reward]]


def unexpected(pairs: Pairs) -> list[str]:
    """Invalid actions that were accepted, and valid actions that were refused."""
    wrong = Counter(
        (each.variant, each.case.reason, _ending(reward)) for each, reward in pairs if not _is_expected(each, reward)
    )
    return [
        f"{name}: {count} ended as {got}. Expected {f'invalid_action:{reason}' if reason else 'a valid action'}."
        for (name, reason, got), count in wrong.items()
    ]


def _is_expected(completion: Completion, reward: Reward) -> bool:
    if completion.case.reason:
        return (reward.outcome, reward.reason) == (Outcome.INVALID_ACTION, completion.case.reason)
    return reward.outcome is not Outcome.INVALID_ACTION or reward.reason == HOLLOW


def untaken(pairs: Pairs) -> list[str]:
    """Variants whose valid actions fail far more often than those of all others."""
    valid = [(each.variant, reward) for each, reward in pairs if not each.case.reason]
    found = []
    for name in VARIANTS:
        failed = [_ending(reward) for variant, reward in valid if variant == name and reward.value is None]
        count = sum(variant == name for variant, _ in valid)
        others = [reward.value is None for variant, reward in valid if variant != name]
        codes = ", ".join(f"{code} {number}" for code, number in Counter(failed).items())
        if len(failed) >= MIN_FAILED and others and len(failed) > MUCH_WORSE * fmean(others) * count:
            found.append(
                f"{name}: {len(failed)} of {count} valid actions could not be scored ({codes}), "
                f"of all others {fmean(others):.0%}. Such texts seem to be too much for the service."
            )
    return found


def oddities(pairs: Pairs) -> list[str]:
    """Results that would mislead training although nothing fails."""
    judged = [(each.variant, reward) for each, reward in pairs if reward.components.get("judge") is not None]
    alone = sum(reward.components["reference"] is None for _, reward in judged)
    hollow = sum(reward.reason == HOLLOW for _, reward in pairs)
    found = []
    if alone > NOTEWORTHY_SHARE * len(judged):
        found.append(f"{Stage.RAG_32B} gave no reference for {alone} of {len(judged)} judged completions.")
    if hollow > NOTEWORTHY_SHARE * (hollow + len(judged)):
        found.append(
            f"{Stage.RAG_8B} answered {hollow} of {hollow + len(judged)} actions with a text that says nothing."
        )
    if len(judged) >= MIN_COMPARED and len({reward.value for _, reward in judged}) == 1:
        found.append(f"all {len(judged)} judged completions have the same reward: there is nothing to learn from it.")
    scores = {name: [r.components["judge"] or 0.0 for variant, r in judged if variant == name] for name in VARIANTS}
    if min(len(scores["clean"]), len(scores["injection"])) >= MIN_COMPARED:
        gain = fmean(scores["injection"]) - fmean(scores["clean"])
        if gain > INJECTION_GAIN:
            found.append(f"injection: the judge scores it {gain:.2f} above clean actions: it obeys what it reads.")
    return found
