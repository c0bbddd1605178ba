"""From scored batches to figures, findings and hints, and the figures as text.

A finding would mislead training, or shows a fault of a service; a hint names the setting that mends it. Called by
`simulation`. Only with `show_text` do the figures hold texts of completions.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from salesrl_trl.build.checks.reward import JUDGE
from salesrl_trl.config import RewardConfig
from salesrl_trl.names import CACHES, JUDGE_SECONDS, USAGE, Stage, usage_of
from salesrl_trl.preflight.load import NOTEWORTHY_SHARE, limits_of, trouble
from salesrl_trl.preflight.made_up import VARIANTS, Completion
from salesrl_trl.reward.batch import BatchReport
from salesrl_trl.reward.service.transport import TRAFFIC
from salesrl_trl.telemetry.step_lines import figure, judge_line
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

Pairs = Sequence[tuple[Completion, Reward]]
Summary = dict[str, Any]
"""An object of `--json`: `step_summary` and `summarise` name its keys."""


class SimulatedStep(NamedTuple):
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


def step_summary(number: int, step: SimulatedStep, show_text: bool) -> Summary:
    """Figures of one step. `completions` have the texts, which quote customers, and is empty without `show_text`."""
    verdicts = {usage_of(provider, "verdicts"): usage.verdicts for provider, usage in step.report.usage.items()}
    return {
        "step": number,
        "seconds": step.report.seconds,
        **_tally(step.rewards),
        "judge": judge_line(number, {JUDGE_SECONDS: step.report.judge_seconds, **verdicts}, list(step.report.usage)),
        "completions": [
            {"variant": made.variant, "outcome": _ending(reward), "value": reward.value, "text": made.case.text}
            for made, reward in step.pairs
            if show_text
        ],
    }


def summarise(steps: Sequence[SimulatedStep], wanted: float, config: RewardConfig) -> Summary:
    """Figures of all steps. Training skips a step with a smaller share of rewards than `wanted`."""
    pairs = [pair for step in steps for pair in step.pairs]
    by_variant = {name: [reward for made, reward in pairs if made.variant == name] for name in VARIANTS}
    reports, seconds = [step.report for step in steps], [step.report.seconds for step in steps]
    services = {
        name: {what: sum(report.traffic[name][what] for report in reports) for what in traffic}
        | {"slots": reports[-1].traffic[name]["slots"]}
        for name, traffic in reports[0].traffic.items()
    }
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


def _tally(rewards: Sequence[Reward]) -> Summary:
    """Count, share with a number, mean, and completions by outcome and reason, the most frequent first."""
    values = [reward.value for reward in rewards if reward.value is not None]
    return {
        "count": len(rewards),
        "scored": len(values) / len(rewards),
        "mean_reward": fmean(values) if values else None,
        "outcomes": dict(Counter(map(_ending, rewards)).most_common()),
    }


def _ending(reward: Reward) -> str:
    return f"{reward.outcome.value}:{reward.reason}" if reward.reason else reward.outcome.value


def waited_for(steps: Sequence[SimulatedStep]) -> dict[str, float]:
    """Seconds in each service, summed over the slowest completion of each step.

    - 8B and the judge have their whole time. 32B has only the time that it took longer than 8B.
    - A wait for a free slot counts as time of the service.
    - A completion that was cut off has no times.
    """
    total = dict.fromkeys((Stage.RAG_8B, Stage.RAG_32B, JUDGE), 0.0)
    for step in steps:
        ways = []
        for seconds in (reward.seconds for reward in step.rewards):
            first, judging = seconds.get(Stage.RAG_8B, 0.0), seconds.get(JUDGE, 0.0)
            longer = max(seconds.get(Stage.RAG_32B, 0.0) - first, 0.0) if JUDGE in seconds else 0.0
            ways.append((first, longer, judging))
        total = {name: sum(pair) for name, *pair in zip(total, total.values(), max(ways, key=sum), strict=True)}
    return total


# Findings


def unexpected(pairs: Pairs) -> list[str]:
    """Invalid actions that were accepted, and valid actions that were refused."""
    wrong = Counter[tuple[str, str, str]]()
    for made, reward in pairs:
        is_invalid, reason = reward.outcome is Outcome.INVALID_ACTION, made.case.reason
        as_expected = (is_invalid and reward.reason == reason) if reason else not is_invalid or reward.reason == HOLLOW
        wrong[made.variant, reason, _ending(reward)] += not as_expected
    return [
        f"{name}: {count} ended as {got}. Expected {f'invalid_action:{reason}' if reason else 'a valid action'}."
        for (name, reason, got), count in wrong.items()
        if count
    ]


def untaken(pairs: Pairs) -> list[str]:
    """Variants whose valid actions fail far more often than those of all others."""
    valid, lines = [(made.variant, reward) for made, reward in pairs if not made.case.reason], []
    for name in VARIANTS:
        failed = [_ending(reward) for variant, reward in valid if variant == name and reward.value is None]
        count = sum(variant == name for variant, _ in valid)
        others = [reward.value is None for variant, reward in valid if variant != name]
        codes = ", ".join(f"{code} {number}" for code, number in Counter(failed).items())
        if len(failed) >= MIN_FAILED and others and len(failed) > MUCH_WORSE * fmean(others) * count:
            lines.append(
                f"{name}: {len(failed)} of {count} valid actions could not be scored ({codes}), "
                f"of all others {fmean(others):.0%}. Such texts seem to be too much for the service."
            )
    return lines


def oddities(pairs: Pairs) -> list[str]:
    """Results that would mislead training although nothing fails."""
    judged = [(made.variant, reward) for made, reward in pairs if reward.components.get("judge") is not None]
    alone = sum(reward.components["reference"] is None for _, reward in judged)
    hollow = sum(reward.reason == HOLLOW for _, reward in pairs)
    asked, lines = hollow + len(judged), []
    if alone > NOTEWORTHY_SHARE * len(judged):
        lines.append(f"{Stage.RAG_32B} gave no reference for {alone} of {len(judged)} judged completions.")
    if hollow > NOTEWORTHY_SHARE * asked:
        lines.append(f"{Stage.RAG_8B} answered {hollow} of {asked} actions with a text that says nothing.")
    if len(judged) >= MIN_COMPARED and len({reward.value for _, reward in judged}) == 1:
        lines.append(f"all {len(judged)} judged completions have the same reward: there is nothing to learn from it.")
    scores = {name: [r.components["judge"] or 0.0 for variant, r in judged if variant == name] for name in VARIANTS}
    if min(len(scores["clean"]), len(scores["injection"])) >= MIN_COMPARED:
        gain = fmean(scores["injection"]) - fmean(scores["clean"])
        if gain > INJECTION_GAIN:
            lines.append(f"injection: the judge scores it {gain:.2f} above clean actions: it obeys what it reads.")
    return lines


# Hints


def hints(
    services: Mapping[str, Mapping[str, int]], waits: Mapping[str, float], overdue: int, config: RewardConfig
) -> list[str]:
    """Advice for every service that had trouble, or else for the service that the steps waited for most.

    `services` has each one's traffic, `waits` the seconds of `waited_for`, and `overdue` is the number of completions
    that `reward_deadline_s` cut off.
    """
    lines = []
    if overdue:
        lines.append(
            f"{overdue} completions were cut off by `reward_deadline_s` ({config.reward_deadline_s:g} s). Raise it if "
            "the services are merely slow, or let them take more calls at once."
        )
    troubles = [f"{name}: {text}" for name, traffic in services.items() for text in trouble(name, traffic, config)]
    slowest = max(waits, key=lambda name: waits[name])
    if troubles or not waits[slowest]:
        return lines + troubles
    for name in (name for name in services if name.startswith(slowest)):
        slots, limits, text = services[name]["slots"], limits_of(name, config), "the steps waited for it most."
        if name == Stage.RAG_32B:
            text += " Each row waits once: `cache_answers` keeps its answers for later runs."
        if slots >= limits.cap:
            advice = f"All {limits.cap} slots were in use: raise {limits.concurrency} if the service can take more."
        elif slots > config.initial_concurrency:
            advice = f"It took up to {slots} calls at once: set `initial_concurrency` to this number."
        else:
            advice = "Its calls hardly queued: only a faster service makes the step shorter."
        lines.append(f"{name}: {text} {advice}")
    return lines


# Text


def step_text(summary: Summary, steps: int) -> str:
    """The lines of one step. Texts are shown as repr, which holds no control characters for the terminal."""
    lines = [
        f"[Step {summary['step']}/{steps}] {summary['seconds']:.2f} s | scored {summary['scored']:.0%} | mean reward "
        f"{figure(summary['mean_reward'])} | {_counts(summary['outcomes'])}",
        summary["judge"],
    ]
    for made in summary["completions"]:
        lines.append(f"  {made['variant']} | {made['outcome']} {figure(made['value'])} | {made['text']!r}")
    return "\n".join(lines)


def report_text(summary: Summary, steps: int, wanted: float) -> str:
    """The text at the end, for so many simulated steps. `wanted` is `min_valid_reward_fraction`."""
    waits = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in summary["waited_for"].items())
    skipped = summary["skipped_steps"]
    least = f"the worst had {summary['least_scored']:.0%} of its completions scored, {wanted:.0%} are needed"
    verdict = f"good: training would skip no step ({least})."
    if skipped:
        which = ", ".join(map(str, skipped))
        verdict = f"bad: training would skip {len(skipped)} of {steps} steps: {which} ({least})."
    return "\n".join(
        (
            *_table(
                ["variant", "count", "mean reward", "outcomes"],
                [
                    [name, tally["count"], figure(tally["mean_reward"]), _counts(tally["outcomes"])]
                    for name, tally in summary["variants"].items()
                ],
            ),
            *_table(
                ["service", *TRAFFIC, "slots"], [[name, *it.values()] for name, it in summary["services"].items()]
            ),
            *_table(
                ["judge", *USAGE],
                [
                    [name, *(f"{value:.4f}" if what == "usd" else value for what, value in usage.items())]
                    for name, usage in summary["judges"].items()
                ],
            ),
            f"calls saved by the cache: {_counts(summary['calls_saved'])}",
            f"seconds per step: p50 {summary['seconds']['p50']:.2f}, max {summary['seconds']['max']:.2f}",
            f"the slowest completions of all steps waited for: {waits}",
            *(f"FINDING {text}" for text in summary["findings"]),
            *(f"HINT {text}" for text in summary["hints"]),
            f"VERDICT {verdict}",
        )
    )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return ["", *(line.rstrip() for line in padded)]
