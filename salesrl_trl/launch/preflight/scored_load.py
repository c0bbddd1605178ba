"""A run's load on its services: made-up completions, scored by its reward chain, batch after batch.

The stage `judge` makes it with `--load N`, and so does `mode: rewards`. `made_up` has the completions.
"""

import contextlib
import itertools
import logging
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from salesrl_trl.data.files import DEMO
from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.assembly import build_reward
from salesrl_trl.launch.checks.outcome import Findings
from salesrl_trl.launch.data.sources import load_drafts
from salesrl_trl.launch.preflight.load import NOTEWORTHY_SHARE, limits_of, trouble
from salesrl_trl.launch.preflight.made_up import DEFAULT_MIX, Completion, batches
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.names import USAGE, Stage
from salesrl_trl.parts.step_lines import figure
from salesrl_trl.reward.batch import BatchReport
from salesrl_trl.reward.reward_loop import RewardLoop
from salesrl_trl.types import DEFAULT_FORMAT, JUDGE, Reward

if TYPE_CHECKING:
    from salesrl_trl.launch.plan import Plan

logger = logging.getLogger(__name__)

HOLLOW = "hollow_answer"  # reason code of a valid action whose answer from the RAG service says nothing
INJECTION_GAIN = 0.15
"""A judge obeys injected text if its mean score is so much above the mean of the clean actions. Means of a dozen
verdicts with a spread of 0.3 differ by half of it by chance."""
MIN_COMPARED = 8  # means of fewer rewards are not compared

Pairs = Sequence[tuple[Completion, Reward]]


class ScoredStep(NamedTuple):
    """A batch, its rewards and its report."""

    completions: list[Completion]
    rewards: list[Reward]
    report: BatchReport

    @property
    def scored(self) -> float:
        """The share of completions with a reward, as training counts it."""
        return fmean(reward.value is not None for reward in self.rewards)


def score_made_up(plan: "Plan", findings: Findings) -> None:
    """Score as many batches as `plan.load` says, and report what a run with these services would find."""
    config, training = plan.config.reward, plan.config.training
    if not config.has_chain or config.asks_nobody:
        raise ConfigError(
            "`reward_funcs` has no `sales`, and made-up completions are actions for the packaged chain. Expected the "
            "chain. Leave out `reward_funcs`."
        )
    if (fields := config.rag_service.action_format.fields) != DEFAULT_FORMAT.fields:
        raise ConfigError(
            f"`rag.action_fields` is {', '.join(fields)}. Expected {', '.join(DEFAULT_FORMAT.fields)}: "
            "nothing else is made up. Leave it out."
        )
    rows = plan.train_rows
    drafts = (
        {row.row_id: draft for row, draft in load_drafts()} if plan.config.data.sources[0].entry.path == DEMO else {}
    )
    group = training.num_generations
    planned = batches(
        rows, drafts, prompts=max(training.generation_batch_size // group, 1), generations=group, seed=training.seed,
        mix=[name for name, weight in DEFAULT_MIX.items() for _ in range(weight)],
    )  # fmt: skip
    steps = list[ScoredStep]()
    with tempfile.TemporaryDirectory() as folder:  # answers of an earlier run would take load off the services
        reward = build_reward(config, plan.reward, rows, *plan.addresses, output_dir=Path(folder))
        with contextlib.closing(RewardLoop(reward)) as reward_loop:
            if config.warm_up_services and (unusable := reward.names.unusable(reward_loop.warm_up())):
                raise unusable[0]
            for number, batch in enumerate(itertools.islice(planned, plan.load), 1):
                begun = reward_loop.begin([{"row": made.row} for made in batch], group)
                result = reward_loop.result(begun, [made.text for made in batch])
                steps.append(ScoredStep(batch, list(result.rewards), result.report))
                logger.info(step_line(number, plan.load, steps[-1]))
    summarise(steps, training.min_valid_reward_fraction, config, findings)


def step_line(number: int, count: int, step: ScoredStep) -> str:
    """`[Load 1/5] 2.31 s | scored 98% | mean reward 0.41 | ok 30, invalid_action:empty 2`."""
    outcomes = ", ".join(f"{name} {times}" for name, times in Counter(map(_ending, step.rewards)).most_common())
    return (
        f"[Load {number}/{count}] {step.report.seconds:.2f} s | scored {step.scored:.0%} | "
        f"mean reward {figure(_mean(step.rewards))} | {outcomes}"
    )


def summarise(steps: Sequence[ScoredStep], needed: float, config: RewardConfig, findings: Findings) -> None:
    """Add the figures of all steps, and advice. Fails if training would skip one, with less than `needed` scored."""
    pairs = [pair for step in steps for pair in zip(step.completions, step.rewards, strict=True)]
    reports, seconds = [step.report for step in steps], [step.report.seconds for step in steps]
    services = {
        name: {what: sum(report.traffic[name][what] for report in reports) for what in traffic}
        | {"slots": reports[-1].traffic[name]["slots"]}
        for name, traffic in reports[0].traffic.items()
    }
    waits, least = waited_for(steps), min(step.scored for step in steps)
    findings.figures |= {"step_p50_s": median(seconds), "step_max_s": max(seconds), "least_scored": least}
    findings.figures |= {f"waited_for_{name}_s": wait for name, wait in waits.items()}
    findings.figures |= {f"{name}_slots": traffic["slots"] for name, traffic in services.items()}
    for name in reports[0].usage:
        used = [report.usage[name] for report in reports]
        findings.figures |= {f"{name}_{what}": sum(getattr(usage, what) for usage in used) for what in USAGE}
    for variant in DEFAULT_MIX:
        if rewards := [reward for made, reward in pairs if made.variant == variant]:
            findings.figures[f"{variant}_mean"] = _mean(rewards)
    findings.notes(misleading(pairs))
    findings.notes(hints(services, waits, sum(reward.reason == "deadline" for _, reward in pairs), config))
    if skipped := [str(number) for number, step in enumerate(steps, 1) if step.scored < needed]:
        endings = Counter(_ending(reward) for _, reward in pairs if reward.value is None).most_common()
        findings.fail(
            f"Training would skip {len(skipped)} of {len(steps)} steps ({', '.join(skipped)}): the worst had "
            f"{least:.0%} of its completions scored ({', '.join(f'{name} {count}' for name, count in endings)}).",
            f"`min_valid_reward_fraction` needs {needed:.0%}: mend the services, or ask them for less at once.",
        )


def _mean(rewards: Sequence[Reward]) -> float | None:
    values = [reward.value for reward in rewards if reward.value is not None]
    return fmean(values) if values else None


def _ending(reward: Reward) -> str:
    return f"{reward.outcome.value}:{reward.reason}" if reward.reason else reward.outcome.value


def waited_for(steps: Sequence[ScoredStep]) -> dict[str, float]:
    """Seconds in each service, with waits for a free slot, summed over the slowest completion of each step. 32B has
    only the time that it took longer than 8B."""
    total = dict.fromkeys((Stage.RAG_8B, Stage.RAG_32B, JUDGE), 0.0)
    for step in steps:
        ways = []
        for seconds in (reward.seconds for reward in step.rewards):
            first, judging = seconds.get(Stage.RAG_8B, 0.0), seconds.get(JUDGE, 0.0)
            longer = max(seconds.get(Stage.RAG_32B, 0.0) - first, 0.0) if JUDGE in seconds else 0.0
            ways.append((first, longer, judging))
        total = {name: sum(pair) for name, *pair in zip(total, total.values(), max(ways, key=sum), strict=True)}
    return total


def misleading(pairs: Pairs) -> list[str]:
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
    injected, clean = (
        [reward.components["judge"] or 0.0 for variant, reward in judged if variant == name]
        for name in ("injection", "clean")
    )
    if min(len(injected), len(clean)) >= MIN_COMPARED:
        gain = fmean(injected) - fmean(clean)
        if gain > INJECTION_GAIN:
            lines.append(f"injection: the judge scores it {gain:.2f} above clean actions: it obeys what it reads.")
    return lines


def hints(
    services: Mapping[str, Mapping[str, int]], waits: Mapping[str, float], overdue: int, config: RewardConfig
) -> list[str]:
    """Advice for every service that had trouble, or else for the one that the steps waited for most. `waits`: of
    `waited_for`. `overdue`: the completions that `reward_deadline_s` cut off."""
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
