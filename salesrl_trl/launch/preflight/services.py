"""The stages `rag` and `judge`: do the services answer, in time and in form, and how far do verdicts differ? A
preflight also puts the load of a step on them. scripts/test_rag_endpoints.py imports this without torch."""

import asyncio
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from salesrl_trl.errors import JudgeInvalid, ServiceError, ServiceTimeout
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
from salesrl_trl.launch.assembly import ServiceClients
from salesrl_trl.launch.checks.addresses import check_rag
from salesrl_trl.launch.checks.outcome import Findings
from salesrl_trl.launch.checks.reward import check_judges, check_stand_ins, rag_key_of
from salesrl_trl.launch.preflight.stage import PreflightStage
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.service.event_loop import clocked, deadline
from salesrl_trl.service.transport import TRAFFIC, Transport
from salesrl_trl.telemetry.perf import percentile
from salesrl_trl.types import JUDGE, Answer, Verdict

if TYPE_CHECKING:
    from salesrl_trl.launch.plan import Plan

T = TypeVar("T")
Call = Callable[[], Awaitable[T]]
Results = Sequence[tuple[T, float] | ServiceError]  # by call: the answer with its seconds, or the error
NO_SERVICES = "`reward_funcs` score, without a RAG service and a judge"

FEWEST_CALLS, MOST_CALLS = 32, 128  # without `--calls`: a noise's standard error is a sixth and a fifteenth of it
NOISY = 0.1  # from this share of noise in the variance of a group's scores on, a note says so
FLAT = 0.02  # a judge whose scores of right and wrong answers spread less does not tell them apart
BIASED = 0.05  # from this gap on a note says that the order of the answers moves a score


@dataclass(frozen=True)
class Target(Generic[T]):
    """A service under the load of a step."""

    transport: Transport | None  # `None` for a judge of one's own
    in_flight: int  # most calls at once
    patience_s: float  # for one call, retries included
    calls: Sequence[Call[T]]
    instead: str | None  # what happens without this service; `None` if training needs it


def _know_branches(plan: "Plan", findings: Findings) -> None:
    """What the stage `config` settles in a run, for a stage that is asked for alone."""
    config, training = plan.config, plan.config.training
    if plan.in_depth:
        training.branches = training.branches or plan.branches_of_rows
        check_stand_ins(config.reward, training.branches, next(iter(config.data.own_sources), None))


def _ask_rag(plan: "Plan", findings: Findings) -> None:
    config = plan.config.reward
    if not config.uses_rag:
        findings.skipped = "the judge scores the policy's own answers" if config.uses_services else NO_SERVICES
        return
    if (address := config.rag_service.base_url) is not None:
        findings.notes(check_rag(address, rag_key_of(config)))
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


RAG_STAGE = PreflightStage("rag", (), (_know_branches, _ask_rag))
JUDGE_STAGE = PreflightStage("judge", (), (_know_branches, _ask_judge, _score_made_up))


def under_load(config: RewardConfig) -> RewardConfig:
    """The settings of a load: all calls are sent at once, none is sent twice, and none waits for a dead service."""
    most = max(config.rag_service.max_concurrency, config.judge_max_concurrency)
    return dataclasses.replace(config, initial_concurrency=most, hedge_fraction=0.0, outage_patience_s=0.0)


def calls_of(plan: "Plan", in_flight: int) -> int:
    """The calls to a service: those of `--calls`, or as many as a step makes at once, within bounds."""
    if plan.calls is not None:
        return plan.calls
    return min(max(in_flight, FEWEST_CALLS), MOST_CALLS)


async def _put_loads(targets: Mapping[str, Target[T]]) -> dict[str, Results[T]]:
    """Make the calls of all services at once, by service name."""

    async def put_load(service: str, target: Target[T]) -> Results[T]:
        gate, patience_s = asyncio.Semaphore(target.in_flight), target.patience_s

        async def answer_of(call: Call[T]) -> tuple[T, float] | ServiceError:
            async with gate:
                try:
                    with deadline(patience_s):
                        async with asyncio.timeout(None if target.transport else patience_s):  # it knows the deadline
                            result = await clocked(call)
                except TimeoutError:
                    result = ServiceTimeout("")
            if not isinstance(result, ServiceTimeout):
                return result
            setting = "`judge_timeout_s`" if service.startswith(JUDGE) else "`rag.timeout_s`"
            return ServiceTimeout(
                f"{service} gave no complete answer within {patience_s:g} s. Look at the service's own log, or raise "
                f"{setting} if it is merely slow.",
                f"{service}_timeout",
            )

        return await asyncio.gather(*map(answer_of, target.calls))

    loads = await asyncio.gather(*(put_load(name, target) for name, target in targets.items()))
    return dict(zip(targets, loads, strict=True))


async def _drop_failing(targets: dict[str, Target[T]], places: Mapping[str, str], findings: Findings) -> None:
    """Ask each service once. Raises the error of one that training needs, or of the first if all of them fail."""
    loads = await _put_loads(
        {name: dataclasses.replace(target, calls=target.calls[:1]) for name, target in targets.items()}
    )
    failed = {name: result for name, [result] in loads.items() if isinstance(result, ServiceError)}
    add_places(failed, places)
    for name, error in failed.items():
        instead = targets.pop(name).instead
        if instead is None or len(failed) == len(loads):
            raise error
        findings.note(str(error), instead)
    for target in targets.values():
        if target.transport is not None:
            target.transport.drain_traffic()


def _report(
    findings: Findings, name: str, target: Target[T], results: Results[T], plan: "Plan", needed: bool
) -> list[T]:
    """Add a load's figures. It fails if training would skip such a batch, and needs this service. Returns the
    answers."""
    least, errors = plan.config.training.min_valid_reward_fraction, [r for r in results if isinstance(r, ServiceError)]
    answered = [result for result in results if not isinstance(result, ServiceError)]
    traffic = dict.fromkeys(TRAFFIC, 0) if target.transport is None else target.transport.drain_traffic()
    seconds, in_flight = [each[1] for each in answered], min(target.in_flight, len(target.calls))
    p50, p95 = (percentile(seconds, share) if seconds else None for share in (0.5, 0.95))
    figures = {
        "calls": len(results), "in_flight": in_flight, "p50_s": p50, "p95_s": p95, "failed": len(errors),
        "http_429": traffic["overloads"], "retries": traffic["retries"],
    }  # fmt: skip
    findings.figures |= {f"{name}_{what}": value for what, value in figures.items()}
    codes = ", ".join(f"{code} {count}" for code, count in Counter(error.code for error in errors).most_common())
    text = f"{name}: of {len(results)} calls, {in_flight} at once, {len(errors)} failed ({codes or 'none'}), and "
    text += f"{traffic['overloads']} requests were turned away."
    is_failure = needed and len(answered) < least * len(results)
    text += f" Training skips a batch with fewer than {least:.0%} of its rewards." * is_failure
    if errors or traffic["overloads"]:
        text += f" The first failure: {errors[0]}" if errors else ""
        findings.add(text, "Mend the service, or ask it for less at once (`max_concurrency`).", is_failure=is_failure)
    return [each[0] for each in answered]


# RAG


async def _examine_rag(plan: "Plan", findings: Findings) -> None:
    config, training, service = plan.config.reward, plan.config.training, plan.config.reward.rag_service
    rag = ServiceClients(under_load(config), plan.reward).rag(plan.addresses[0])
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
        await _drop_failing(targets, dict.fromkeys(targets, f"at {rag.identity}"), findings)
        for name, results in (await _put_loads(targets)).items() if count else ():
            needed = targets[name].instead is None
            answered = _report(findings, name, targets[name], results, plan, needed)
            findings.figures[f"{name}_without_passages"] = without = sum(not each.passages for each in answered)
            if 2 * without > len(answered):
                findings.note(
                    f"{name}: {without} of {len(answered)} answers have no passage.",
                    f"Lower `rag.score_threshold` ({service.score_threshold:g}). Is the service's index loaded? Does "
                    "it know the rows' `tenant_id`?",
                )
    finally:
        await answers.aclose()


# The judge


def _rubrics(plan: "Plan") -> dict[str, str]:
    """Every rubric that is weighed, with the first branch that it scores."""
    scoring = plan.reward.scoring
    return {rubric: branch for branch in reversed([*scoring.weights]) for rubric in scoring.rubrics(branch).values()}


def _judge_targets(
    judge: Judge, plan: "Plan"
) -> tuple[dict[str, Target[Sequence[Verdict]]], list[list[JudgedSample]]]:
    """By service name, how a provider is asked; and the samples of each call, which all judges get."""
    config, training = plan.config.reward, plan.config.training
    verdicts = training.generation_batch_size * config.judging.repeats
    if judge.orders:
        verdicts = math.ceil(training.generation_batch_size / training.num_generations) * judge.orders
    count = calls_of(plan, min(verdicts, config.judge_max_concurrency))
    action_format = None if config.judges_answers else config.rag_service.action_format
    planned = samples(_rubrics(plan), action_format, max(count, MIN_CALLS), of_groups=judge.orders > 0)
    asked: dict[str, ProviderClient | None] = {JUDGE: None}
    if isinstance(judge, JudgeClient):
        asked = {client.settings.transport.service: client for client in judge.providers.values()}
    else:  # a judge of one's own reads the answers in an order of its own
        planned = [[dataclasses.replace(sample, candidate_first=True) for sample in call] for call in planned]
    patience_s = max([config.judge_timeout_s, *(each.timeout_s or 0.0 for each in config.judges.providers)])

    async def ask(client: ProviderClient | None, call: Sequence[JudgedSample]) -> Sequence[Verdict]:
        sample, candidates = call[0], [(sample.action, sample.candidate) for sample in call]
        if isinstance(judge, JudgeClient) and client is not None:
            material = judge.material(sample.rubric, sample.row, candidates, sample.reference)
            first = {place for place, sample in enumerate(call) if sample.candidate_first}
            order = [*first, len(call), *({*range(len(call))} - first)]
            return await client.ask(material, order=order, patient=True)
        return await judged(judge, sample.rubric, sample.row, candidates, sample.reference)

    targets = {}
    for name, client in asked.items():
        transport = None if client is None else client.settings.transport
        most = config.judge_max_concurrency if transport is None else transport.max_concurrency
        calls = [partial(ask, client, call) for call in planned]
        targets[name] = Target(transport, min(verdicts, most), patience_s, calls, "Others give its verdicts.")
    return targets, planned


async def _examine_judge(plan: "Plan", findings: Findings) -> None:
    config, least = plan.config.reward, plan.config.training.min_valid_reward_fraction
    judge = ServiceClients(under_load(config), plan.reward).judge(plan.addresses[1])
    targets, planned = _judge_targets(judge, plan)
    try:
        await _drop_failing(targets, judge.places, findings)
        loads = {} if plan.calls == 0 else await _put_loads(targets)
        scored: dict[str, list[tuple[JudgedSample, float]]] = {}
        most = max([sum(isinstance(each, tuple) for each in results) for results in loads.values()], default=0)
        hopeless = most < least * len(planned)
        for name, results in loads.items():
            _report(findings, name, targets[name], results, plan, needed=hopeless)
            invalid = sum(isinstance(result, JudgeInvalid) for result in results)
            findings.figures[f"{name}_invalid_share"] = invalid / len(results)
            scored[name] = [
                (sample, verdict.candidate)
                for call, result in zip(planned, results, strict=True)
                if not isinstance(result, ServiceError)
                for sample, verdict in zip(call, result[0], strict=True)
            ]
            _report_noise(findings, name, noise_of(scored[name]), judge.orders, config.judging.repeats)
        usage = judge.drain_usage().values()
        findings.figures["judge_tokens"] = sum(used.prompt_tokens + used.completion_tokens for used in usage)
        findings.figures["judge_usd"] = sum(used.usd for used in usage)
    finally:
        await judge.aclose()


def _report_noise(findings: Findings, name: str, noise: Noise, orders: int, times: int) -> None:
    """`orders`: the judge's, if it judges groups; `times`: the verdicts on an answer that is judged alone."""
    setting, times = ("judge_mode.orders", orders) if orders else ("judge_mode.repeats", times)
    share = noise.share(times)
    figures = {**dataclasses.asdict(noise), "noise_share": share}
    findings.figures |= {f"{name}_{what}": value for what, value in figures.items()}
    if noise.spread_sd is not None and noise.spread_sd < FLAT:
        findings.note(
            f"{name} scores right and wrong answers of the packaged set alike: their scores have a standard deviation "
            f"of {noise.spread_sd:.3f}.",
            "Look at the rubrics and at the judge's model.",
        )
    elif share is not None and share > NOISY:
        findings.note(
            f"{name} is noisy: {share:.0%} of the variance of a group's scores is noise.",
            f"Raise `{setting}` ({times}), choose another model, or write a clearer rubric.",
        )
    gap, error = noise.order_gap, noise.order_gap_error or 0.0
    if gap is not None and abs(gap) >= max(BIASED, 2 * error):
        direction = "higher" if gap > 0 else "lower"
        where = "stands in the first half of its group" if orders else "stands before the reference"
        findings.note(
            f"{name} scores a candidate {abs(gap):.2f} {direction} where it {where}.",
            "" if times % 2 == 0 else f"Set `{setting}: 2`, for a verdict in each order.",
        )
