"""The stages `rag` and `judge`: do the services answer, in time and in form, and how far do verdicts differ?

Before a run they only ask the addresses (`launch.checks.reward`). A preflight also puts the load of a step on them.
`runner` lists them, and `__main__` runs one of them alone without torch, so nothing here imports torch.
"""

import asyncio
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from salesrl_trl.errors import JudgeInvalid, ServiceError
from salesrl_trl.judged.cache import AnswerStore
from salesrl_trl.judged.judge import Judge, JudgeClient, judged
from salesrl_trl.judged.judge_reward import add_places
from salesrl_trl.judged.noise import (
    MIN_CALLS,
    JudgedSample,
    Noise,
    noise_of,
    samples,
)
from salesrl_trl.judged.provider import ProviderClient
from salesrl_trl.judged.rag_client import RagAnswers
from salesrl_trl.launch.assembly import ServiceClients, budget_of
from salesrl_trl.launch.checks.addresses import check_rag
from salesrl_trl.launch.checks.outcome import Findings
from salesrl_trl.launch.checks.reward import check_judges, rag_key_of
from salesrl_trl.launch.preflight.load import Load, Target, limits_of, put_loads, trouble
from salesrl_trl.launch.preflight.stage import PreflightStage
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.telemetry.perf import percentile
from salesrl_trl.types import JUDGE, Answer, Verdict

if TYPE_CHECKING:
    from salesrl_trl.launch.plan import Plan

T = TypeVar("T")
NO_SERVICES = "`reward_funcs` score, without a RAG service and a judge"

FEWEST_CALLS, MOST_CALLS = 32, 128  # without `--calls`: a noise's standard error is a sixth and a fifteenth of it
NOISY = 0.1  # from this share of noise in the variance of a group's scores on, a note says so
FLAT = 0.02  # a judge whose scores of right and wrong answers spread less does not tell them apart
BIASED = 0.05  # from this gap on a note says that the order of the answers moves a score
MOST_REPEATS = 8  # most `repeats` of `judge_mode` that a note advises


def _ask_rag(plan: "Plan", findings: Findings) -> None:
    config = plan.config.reward
    if not config.uses_rag:
        findings.skipped = "the judge scores the policy's own answers" if config.uses_services else NO_SERVICES
        return
    if (address := config.rag_service.base_url) is not None:
        findings.notes(check_rag(address, rag_key_of(config)))  # also where other parts can't be made
    if config.has_chain and not config.asks_nobody and _puts_load(plan):
        asyncio.run(_examine_rag(plan, findings))


def _ask_judge(plan: "Plan", findings: Findings) -> None:
    config = plan.config.reward
    if not config.uses_services or not _rubrics(plan):
        findings.skipped = "no branch weighs a judge" if config.uses_services else NO_SERVICES
        return
    findings.notes(check_judges(config, plan.reward))
    if _puts_load(plan):
        asyncio.run(_examine_judge(plan, findings))


def _score_made_up(plan: "Plan", findings: Findings) -> None:
    if plan.load and _puts_load(plan):
        from salesrl_trl.launch.preflight.scored_load import score_made_up  # brings torch

        score_made_up(plan, findings)


def _puts_load(plan: "Plan") -> bool:
    """Whether this process puts the load of all processes on the services: the first one does, in a preflight."""
    if plan.in_depth:
        _ = plan.addresses  # the processes start embedded services together
    return plan.in_depth and plan.config.training.process_index == 0


RAG_STAGE = PreflightStage("rag", ("config",), (_ask_rag,))  # passages for rows' questions, at a step's load
JUDGE_STAGE = PreflightStage("judge", ("config",), (_ask_judge, _score_made_up))  # valid verdicts at a step's load


def under_load(config: RewardConfig) -> RewardConfig:
    """The settings of a load: all calls are sent at once, none is sent twice, and none waits for a dead service."""
    most = max(config.rag_service.max_concurrency, config.judge_max_concurrency)
    return dataclasses.replace(config, initial_concurrency=most, hedge_fraction=0.0, outage_patience_s=0.0)


def calls_of(plan: "Plan", in_flight: int) -> int:
    """The calls to a service: those of `--calls`, or as many as a step makes at once, within bounds."""
    if plan.calls is not None:
        return plan.calls
    return min(max(in_flight, FEWEST_CALLS), MOST_CALLS)


async def _drop_failing(
    targets: dict[str, Target[T]], places: Mapping[str, str], config: RewardConfig, findings: Findings
) -> None:
    """Ask each service once. Raises the error of one that training needs, or of the first if all of them fail."""
    once = {name: dataclasses.replace(target, calls=target.calls[:1]) for name, target in targets.items()}
    loads = await put_loads(once, config)
    failed = {name: load.errors[0] for name, load in loads.items() if load.errors}
    add_places(failed, places)
    for name, error in failed.items():
        instead = targets.pop(name).instead
        if instead is None or len(failed) == len(loads):
            raise error
        findings.note(str(error), instead)


def _too_few(load: Load[T], plan: "Plan") -> bool:
    return len(load.answers) < plan.config.training.min_valid_reward_fraction * len(load.results)


def _report(findings: Findings, name: str, load: Load[T], plan: "Plan", needed: bool) -> None:
    """Add a load's figures and trouble. It fails if training would skip such a batch, and needs this service."""
    config, least = plan.config.reward, plan.config.training.min_valid_reward_fraction
    seconds = [result[1] for result in load.results if not isinstance(result, ServiceError)]
    p50, p95 = (percentile(seconds, share) if seconds else None for share in (0.5, 0.95))
    figures = {
        "calls": len(load.results), "in_flight": load.in_flight, "p50_s": p50, "p95_s": p95,
        "failed": len(load.errors), "http_429": load.traffic["overloads"], "retries": load.traffic["retries"],
    }  # fmt: skip
    findings.figures |= {f"{name}_{what}": value for what, value in figures.items()}
    for text in trouble(name, load.traffic, config):
        findings.note(f"{name} {text}")
    if not load.errors:
        return
    times = f"p50 {p50:.2f} s, p95 {p95:.2f} s" if seconds else "no answer"
    codes = Counter(error.code for error in load.errors).most_common()
    text = (
        f"{name}: {len(load.results)} calls, {load.in_flight} at once: {times}, {len(load.errors)} failed, "
        f"{load.traffic['overloads']} turned away, {load.traffic['retries']} retries "
        f"({', '.join(f'{code} {count}' for code, count in codes)}). The first failure: {load.errors[0]}"
    )
    if needed and _too_few(load, plan):
        findings.fail(
            f"{text} Training skips a batch with fewer than {least:.0%} of its rewards.",
            f"Mend the service, or ask it for less at once ({limits_of(name, config).concurrency}).",
        )
    else:
        findings.note(text)


# RAG


async def _examine_rag(plan: "Plan", findings: Findings) -> None:
    config, training, service = plan.config.reward, plan.config.training, plan.config.reward.rag_service
    budget = budget_of(config, Path(training.output_dir))  # the run's own: what a preflight asks counts in its folder
    rag = ServiceClients(under_load(config), plan.reward, budget=budget).rag(plan.addresses[0])
    stores = (AnswerStore(most=0), AnswerStore(most=0))
    answers = RagAnswers(rag, service.score_threshold, service.top_k, service.action_format, *stores)
    batch, most, patience_s = training.generation_batch_size, service.max_concurrency, service.timeout_s
    completions, prompts = min(batch, most), min(max(batch // training.num_generations, 1), most)
    count = calls_of(plan, completions)
    rows = list(itertools.islice(itertools.cycle(plan.train_rows), max(count, 1)))
    ask_8b = [partial(answers.ask_8b, row, answers.plain_action(row.conversation[-1].content)) for row in rows]
    ask_32b = [partial(answers.ask_32b, row) for row in rows[: max(count // training.num_generations, prompts)]]
    alone = None if plan.reward.reference_weighed else "Without a reference the judge scores each answer alone."
    (name_8b, transport_8b), (name_32b, transport_32b) = rag.transports.items()
    targets: dict[str, Target[Answer]] = {
        name_8b: Target(transport_8b, completions, patience_s, ask_8b, None),
        name_32b: Target(transport_32b, prompts, patience_s, ask_32b, alone),
    }
    try:
        await _drop_failing(targets, dict.fromkeys(targets, f"at {rag.identity}"), config, findings)
        for name, load in (await put_loads(targets, config)).items() if count else ():
            _report(findings, name, load, plan, needed=targets[name].instead is None)
            without = sum(not answer.passages for answer in load.answers)
            findings.figures[f"{name}_without_passages"] = without
            if 2 * without <= len(load.answers):
                continue
            text = f"{name}: {without} of {len(load.answers)} answers have no passage."
            if name == name_8b and not await answers.index_has_some(plan.train_rows[0]):
                findings.fail(
                    f"{text} The first row finds none without a threshold either. Expected some: without passages a "
                    "completion is not scored (`no_passages`).",
                    "Look whether the service's index is loaded, and whether it knows the rows' `tenant_id`.",
                )
            else:
                remedy = f"Lower `rag.score_threshold` ({service.score_threshold:g}) if the index knows the rows'"
                findings.note(text, f"{remedy} subjects.")
    finally:
        await answers.aclose()
        if budget is not None:
            budget.settle()


# The judge


def _rubrics(plan: "Plan") -> dict[str, str]:
    """Every rubric that is weighed, with the first branch that it scores."""
    scoring = plan.reward.scoring
    return {rubric: branch for branch in reversed([*scoring.weights]) for rubric in scoring.rubrics(branch).values()}


def _judge_targets(
    judge: Judge, plan: "Plan"
) -> tuple[dict[str, Target[Sequence[Verdict]]], list[list[JudgedSample]], bool]:
    """By service name, how a provider is asked, with its share of a step's calls (a mere fallback has all); the
    samples of each call, which all judges get; and whether more than one call is made."""
    config, training, scoring = plan.config.reward, plan.config.training, plan.reward.scoring
    verdicts = training.generation_batch_size * config.judging.repeats
    if judge.orders:
        verdicts = math.ceil(training.generation_batch_size / training.num_generations) * judge.orders
    verdicts *= max(len(scoring.rubrics(branch)) for branch in scoring.weights)
    clients = list(judge.providers.values()) if isinstance(judge, JudgeClient) else []
    asked: list[ProviderClient | None] = [*clients] or [None]
    weights = sum(client.settings.weight for client in clients)
    in_flight = {} if clients else {JUDGE: min(verdicts, config.judge_max_concurrency)}
    for client in clients:
        name, share = client.settings.transport.service, client.settings.weight / weights or 1
        in_flight[name] = min(math.ceil(verdicts * share), limits_of(name, config).cap)
    count = max(calls_of(plan, number) for number in in_flight.values())
    action_format = None if config.judges_answers else config.rag_service.action_format
    planned = samples(_rubrics(plan), action_format, max(count, MIN_CALLS), of_groups=judge.orders > 0)
    if not clients:  # a judge of one's own reads the answers in an order of its own
        planned = [[dataclasses.replace(sample, candidate_first=True) for sample in call] for call in planned]
    timeouts = [provider.timeout_s or 0.0 for provider in config.judges.providers]
    patience_s = max([config.judge_timeout_s, *timeouts])

    async def ask(client: ProviderClient | None, call: Sequence[JudgedSample]) -> Sequence[Verdict]:
        sample, candidates = call[0], [(sample.action, sample.candidate) for sample in call]
        if isinstance(judge, JudgeClient) and client is not None:
            material = judge.material(sample.rubric, sample.row, candidates, sample.reference)
            first = {place for place, sample in enumerate(call) if sample.candidate_first}
            order = [*first, len(call), *({*range(len(call))} - first)]
            return await client.ask(material, order=order, patient=True)
        return await judged(judge, sample.rubric, sample.row, candidates, sample.reference)

    targets = {
        name: Target(
            None if client is None else client.settings.transport,
            number,
            patience_s,
            [partial(ask, client, call) for call in planned],
            "Its verdicts go to the other providers.",
        )
        for (name, number), client in zip(in_flight.items(), asked, strict=True)
    }
    return targets, planned, count > 0


async def _examine_judge(plan: "Plan", findings: Findings) -> None:
    config = plan.config.reward
    budget = budget_of(config, Path(plan.config.training.output_dir))
    clients = ServiceClients(under_load(config), plan.reward, budget=budget)
    judge = clients.judge(plan.addresses[1], for_rewards=True)
    targets, planned, has_load = _judge_targets(judge, plan)
    try:
        await _drop_failing(targets, judge.places, config, findings)
        loads = await put_loads(targets, config) if has_load else {}
        for client in judge.providers.values() if isinstance(judge, JudgeClient) else ():
            for line in client.form.learnt:
                findings.note(f"{line[0].upper()}{line[1:]}.")
        if not has_load:
            return
        hopeless = all(_too_few(load, plan) for load in loads.values())
        for name, load in loads.items():
            _report(findings, name, load, plan, needed=hopeless)
            invalid = sum(isinstance(error, JudgeInvalid) for error in load.errors)
            findings.figures[f"{name}_invalid_share"] = invalid / len(load.results)
            scored = [
                (sample, verdict.candidate)
                for call, result in zip(planned, load.results, strict=True)
                if not isinstance(result, ServiceError)
                for sample, verdict in zip(call, result[0], strict=True)
            ]
            _report_noise(findings, name, noise_of(scored), judge.orders, config.judging.repeats)
        usage = judge.drain_usage().values()
        findings.figures["judge_tokens"] = sum(used.prompt_tokens + used.completion_tokens for used in usage)
        findings.figures["judge_usd"] = sum(used.usd for used in usage)
    finally:
        await judge.aclose()
        if budget is not None:
            budget.settle()


def _report_noise(findings: Findings, name: str, noise: Noise, orders: int, times: int) -> None:
    """`orders`: the judge's, if it judges groups; `times`: the verdicts on an answer that is judged alone."""
    setting, times = ("judge_mode.orders", orders) if orders else ("judge_mode.repeats", times)
    share = noise.share(times)
    figures = {**dataclasses.asdict(noise), "noise_share": share}
    findings.figures |= {f"{name}_{what}": value for what, value in figures.items()}
    if noise.spread_sd is not None and noise.spread_sd < FLAT:
        findings.note(
            f"{name} scores right and wrong answers of the packaged set alike: their scores have a standard deviation "
            f"of {noise.spread_sd:.3f}. Expected {FLAT} or more: from equal scores nothing is learned.",
            "Look at the rubrics and at the judge's model.",
        )
    elif share is not None and noise.verdict_sd is not None and share > NOISY:
        remedy = "Choose another model, write a clearer rubric, or lower the `temperature` of a provider that has one."
        for repeats in range(2 * (times // 2) + 2, MOST_REPEATS + 1, 2):
            if (left := noise.share(repeats)) is not None and left <= NOISY:
                remedy = f"Set `{setting}: {repeats}`: it brings the share of noise to {left:.0%}."
                break
        findings.note(
            f"{name} is noisy: its verdicts on one answer have a standard deviation of {noise.verdict_sd:.3f}, those "
            f"on right and wrong answers {noise.spread_sd:.3f}. So {share:.0%} of the variance of a group's scores is "
            "noise, and more in groups of similar answers.",
            remedy,
        )
    gap, error = noise.order_gap, noise.order_gap_error or 0.0
    if gap is not None and abs(gap) >= max(BIASED, 2 * error):
        direction = "higher" if gap > 0 else "lower"
        where = "stands in the first half of its group" if orders else "stands before the reference"
        findings.note(
            f"{name} scores a candidate {abs(gap):.2f} {direction} where it {where}.",
            "" if times % 2 == 0 else f"Set `{setting}: 2`, for a verdict in each order.",
        )
