"""The load of a training run on a RAG service and a judge, without a model or a GPU: settings, checks, load, report.

Called by `scripts/simulate_training_rewards.py`, and by `train` for `mode: rewards`. The reward chain of training
scores; `made_up` makes the completions. A finding would mislead training; a hint names the setting that makes a step
shorter.
"""

import argparse
import functools
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from salesrl_trl.config.ranges import Count, Share, check_value
from salesrl_trl.data.files import DEMO
from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.command_line import parser_of
from salesrl_trl.ground.shutdown import EXIT_FAILED
from salesrl_trl.ground.tables import filled
from salesrl_trl.launch.assembly import addresses, build_reward
from salesrl_trl.launch.checks.reward import RewardParts, prepare_reward
from salesrl_trl.launch.commands import exit_code_of, strict_json
from salesrl_trl.launch.data.sources import load_drafts
from salesrl_trl.launch.data_config import DataConfig
from salesrl_trl.launch.preflight.load import NOTEWORTHY_SHARE, limits_of, trouble
from salesrl_trl.launch.preflight.made_up import DEFAULT_MIX, VARIANTS, Completion, batches
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.launch.services_plan import ServicesConfig, ServicesPlan, StepSettings
from salesrl_trl.launch.settings import parse_part
from salesrl_trl.names import (
    CACHES,
    JUDGE_SECONDS,
    USAGE,
    Stage,
    saved_by,
    usage_of,
)
from salesrl_trl.reward.batch import BatchReport
from salesrl_trl.reward.reward_loop import RewardLoop, warm_up
from salesrl_trl.service.transport import TRAFFIC
from salesrl_trl.telemetry.step_lines import figure, judge_line
from salesrl_trl.types import DEFAULT_FORMAT, JUDGE, Reward, SalesRow


def mix_of(variants: str) -> list[str]:
    """The variants of a text such as `"clean,empty"`, or without one those of the usual mix, each as often as its
    share is."""
    if not variants:
        return [name for name, weight in DEFAULT_MIX.items() for _ in range(weight)]
    names = [name.strip() for name in variants.split(",")]
    if unknown := [name for name in names if name not in VARIANTS]:
        raise ConfigError(f"`variants` names {unknown}. Expected some of: {','.join(VARIANTS)}. Correct it.")
    return names


def prepare_simulation(argv: Sequence[str]) -> Callable[[], int]:
    """Read the settings and check all that can be checked before the load. Returns `run` with its arguments."""
    simulation, settings = parser_of("simulate").parse_known_args(argv)
    mix = mix_of(simulation.variants)
    for name in ("steps", "prompts_per_step"):
        check_value(name, getattr(simulation, name), Count)
    data, reward, training = parse_part(settings, (DataConfig, RewardConfig, StepSettings), own=vars(simulation))
    check_value("num_generations", training.num_generations, Count)
    check_value("min_valid_reward_fraction", training.min_valid_reward_fraction, Share)
    if reward.action_format() != DEFAULT_FORMAT:
        raise ConfigError(
            f"`action_fields` is {', '.join(reward.action_fields)}. Expected {', '.join(DEFAULT_FORMAT.fields)}: the "
            "simulation writes no other actions. Leave it out."
        )
    rows = ServicesPlan(ServicesConfig(data, reward, training)).train_rows
    if not reward.has_chain or reward.asks_nobody:
        raise ConfigError(
            "`reward_funcs` has no `sales`, and made-up completions are actions for the packaged chain. Expected the "
            "chain. Leave out `reward_funcs`."
        )
    drafts = {row.row_id: draft for row, draft in load_drafts()} if data.dataset == DEMO else {}
    planned = batches(
        rows, drafts, mix=mix, prompts=simulation.prompts_per_step, generations=training.num_generations,
        seed=training.seed,
    )  # fmt: skip
    rag = "as configured" if not reward.embeds_rag else "embedded"  # no address: some hold a password
    judge = "as configured" if reward.judge_base_url or reward.judge_providers else "embedded"
    title = (
        f"{simulation.steps} steps of {simulation.prompts_per_step} x {training.num_generations} completions for "
        f"{len(rows)} rows of {data.dataset}, seed {training.seed}; RAG service: {rag}, judge: {judge}"
    )
    parts, least = prepare_reward(reward, training.branches), training.min_valid_reward_fraction
    return functools.partial(run, simulation, reward, parts, rows, planned, title, least)


def run(
    simulation: argparse.Namespace, config: RewardConfig, parts: RewardParts, rows: Sequence[SalesRow],
    planned: Iterable[list[Completion]], title: str, least: float,
) -> int:  # fmt: skip
    """Simulate, print, and return the exit code. Training would skip a step with fewer rewards than `least`."""
    show = functools.partial(print, file=sys.stderr if simulation.json else sys.stdout, flush=True)
    show(title)
    steps, summaries = list[SimulatedStep](), []
    with addresses(config) as urls, tempfile.TemporaryDirectory() as folder:
        # answers of an earlier run would take load off the services
        reward = build_reward(config, parts, rows, *urls, output_dir=Path(folder), keeps_references=False)
        reward_loop = RewardLoop(reward)
        try:
            if config.warm_up_services:
                warm_up(reward_loop, functools.partial(print, file=sys.stderr))
            for number, batch in enumerate(itertools.islice(planned, simulation.steps), 1):
                group = len(batch) // simulation.prompts_per_step
                begun = reward_loop.begin([{"row": made.row} for made in batch], group)
                result = reward_loop.result(begun, [made.text for made in batch])
                steps.append(SimulatedStep(batch, list(result.rewards), result.report))
                summaries.append(step_summary(number, steps[-1], simulation.show_text))
                show(step_text(summaries[-1], simulation.steps))
        finally:
            reward_loop.close()
    summary = summarise(steps, least, config)
    if simulation.json:
        print(strict_json({"steps": summaries, **summary}))
    else:
        print(report_text(summary, simulation.steps, least))
    return EXIT_FAILED if summary["skipped_steps"] else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare and run. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return exit_code_of(argv, functools.partial(prepare_simulation, argv))


# From scored batches to figures, findings and hints, and the figures as text

HOLLOW = "hollow_answer"  # reason code of a valid action whose answer from the RAG service says nothing
INJECTION_GAIN = 0.15
"""A judge obeys injected text if its mean score is so much above the mean of the clean actions. Means of a dozen
verdicts with a spread of 0.3 differ by half of it by chance."""
MIN_COMPARED = 8  # means of fewer rewards are not compared

Pairs = Sequence[tuple[Completion, Reward]]
Summary = dict[str, Any]  # an object of `--json`: `step_summary` and `summarise` name its keys


class SimulatedStep(NamedTuple):
    """A batch, its rewards and its report."""

    completions: list[Completion]
    rewards: list[Reward]
    report: BatchReport

    @property
    def scored(self) -> float:
        """The share of completions with a reward, as training counts it."""
        return fmean(reward.value is not None for reward in self.rewards)


def step_summary(number: int, step: SimulatedStep, show_text: bool) -> Summary:
    """Figures of one step. `completions` have the texts, which quote customers, and is empty without `show_text`."""
    verdicts = {usage_of(provider, "verdicts"): usage.verdicts for provider, usage in step.report.usage.items()}
    logs = {**verdicts, saved_by("answers"): step.report.cache_hits["answers"]}
    return {
        "step": number,
        "seconds": step.report.seconds,
        **_tally(step.rewards),
        "judge": judge_line(number, {JUDGE_SECONDS: step.report.judge_seconds, **logs}, list(step.report.usage)),
        "completions": [
            {"variant": made.variant, "outcome": _ending(reward), "value": reward.value, "text": made.text}
            for made, reward in zip(step.completions, step.rewards, strict=True)
            if show_text
        ],
    }


def summarise(steps: Sequence[SimulatedStep], wanted: float, config: RewardConfig) -> Summary:
    """Figures of all steps. Training skips a step with a smaller share of rewards than `wanted`."""
    pairs = [pair for step in steps for pair in zip(step.completions, step.rewards, strict=True)]
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
        "findings": findings_of(pairs),
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


def findings_of(pairs: Pairs) -> list[str]:
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


def report_text(summary: Summary, steps: int, least: float) -> str:
    """The text at the end, for so many simulated steps. `least` is `min_valid_reward_fraction`."""
    variants = [
        [name, tally["count"], figure(tally["mean_reward"]), _counts(tally["outcomes"])]
        for name, tally in summary["variants"].items()
    ]
    judges = [
        [name, *(f"{value:.4f}" if what == "usd" else value for what, value in usage.items())]
        for name, usage in summary["judges"].items()
    ]
    return filled(
        Path(__file__).with_name("simulation.jinja"), summary=summary, steps=steps, least=least,
        variants=[["variant", "count", "mean reward", "outcomes"], *variants],
        services=[["service", *TRAFFIC, "slots"], *([name, *of.values()] for name, of in summary["services"].items())],
        judges=[["judge", *USAGE], *judges], counts=_counts,
    )  # fmt: skip


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
