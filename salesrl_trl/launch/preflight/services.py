"""The stages `rag` and `judge`: do the services answer correctly and in time, and how noisy are the verdicts? A
preflight also load-tests them with a step's calls. scripts/test_rag_endpoints.py imports this without torch."""

import asyncio
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from salesrl_trl.agents.customer import Customer
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
from salesrl_trl.launch.checks.reward import check_judges, check_partner, check_stand_ins, rag_key_of
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
Results = Sequence[tuple[T, float] | ServiceError]  # per call: the answer with its seconds, or the error
NO_SERVICES = "`reward_funcs` score without a RAG service or judge"

FEWEST_CALLS, MOST_CALLS = 32, 128  # without `--calls`; the noise's relative standard error is then 1/6 or 1/15
NOISY = 0.1  # note a share of noise in the variance of a group's scores above this
FLAT = 0.02  # a judge does not distinguish right and wrong answers if its scores spread less
BIASED = 0.05  # note a position bias of at least this


@dataclass(frozen=True)
class Target(Generic[T]):
    """A service to load-test."""

    transport: Transport | None  # `None` for the user's own judge
    in_flight: int  # concurrency limit
    patience_s: float  # timeout of a call, including retries
    calls: Sequence[Call[T]]
    instead: str | None  # the consequence of an outage; `None` if training needs the service


def _know_branches(plan: "Plan", findings: Findings) -> None:
    """Do the part of the stage `config` that these stages need if they run alone."""
    config, training = plan.config, plan.config.training
    if plan.in_depth:
        training.branches = training.branches or plan.branches_of_rows
        check_stand_ins(config.reward, training.branches, next(iter(config.data.own_sources), None))


def _ask_rag(plan: "Plan", findings: Findings) -> None:
    config = plan.config.reward
    if not config.uses_rag:
        findings.skipped = "the judge scores the policy's answers directly" if config.uses_services else NO_SERVICES
        return
    if (address := config.rag_service.base_url) is not None:
        findings.notes(check_rag(address, rag_key_of(config)))
    if config.has_chain and not config.asks_nobody and _puts_load(plan):
        asyncio.run(_examine_rag(plan, findings))


def _ask_judge(plan: "Plan", findings: Findings) -> None:
    config = plan.config.reward
    if not config.uses_services or not _rubrics(plan):
        findings.skipped = "no branch weights a judge" if config.uses_services else NO_SERVICES
        return
    findings.notes(check_judges(config, plan.reward))
    if _puts_load(plan):
        asyncio.run(_examine_judge(plan, findings))


def _ask_partner(plan: "Plan", findings: Findings) -> None:
    """Let the model that plays the customer answer an offer once."""
    config = plan.config.reward
    if not config.asks_model:
        return
    findings.notes(check_partner(config, plan.reward))
    if _puts_load(plan):
        asyncio.run(_hear_partner(plan, findings))


async def _hear_partner(plan: "Plan", findings: Findings) -> None:
    customer, model = Customer(), ServiceClients(under_load(plan.config.reward), plan.reward).partner()
    customer.connect(model)
    try:
        heard = await clocked(customer.warm_up())
    finally:
        await model.http.aclose()
    if isinstance(heard, ServiceError):
        raise heard
    findings.figures["customer_s"] = heard[1]


def _score_made_up(plan: "Plan", findings: Findings) -> None:
    if plan.load and _puts_load(plan):
        from salesrl_trl.launch.preflight.scored_load import score_made_up  # imports torch

        score_made_up(plan, findings)


def _puts_load(plan: "Plan") -> bool:
    """Whether this process load-tests the services for all: in a preflight, the first one does."""
    if plan.in_depth:
        _ = plan.addresses  # all processes start embedded services together
    return plan.in_depth and plan.config.training.process_index == 0


RAG_STAGE = PreflightStage("rag", (), (_know_branches, _ask_rag))
JUDGE_STAGE = PreflightStage("judge", (), (_know_branches, _ask_judge, _ask_partner, _score_made_up))


def under_load(config: RewardConfig) -> RewardConfig:
    """The settings of a load test: all calls are sent at once, without hedging or waiting for an outage to end."""
    most = max(config.rag_service.max_concurrency, config.judge_max_concurrency)
    return dataclasses.replace(config, initial_concurrency=most, hedge_fraction=0.0, outage_patience_s=0.0)


def calls_of(plan: "Plan", in_flight: int) -> int:
    """The calls to a service: `--calls`, or a step's concurrent calls within bounds."""
    return min(max(in_flight, FEWEST_CALLS), MOST_CALLS) if plan.calls is None else plan.calls


async def _put_loads(targets: Mapping[str, Target[T]]) -> dict[str, Results[T]]:
    """Call all services concurrently. Returns the results by service name."""

    async def put_load(service: str, target: Target[T]) -> Results[T]:
        gate, patience_s = asyncio.Semaphore(target.in_flight), target.patience_s

        async def answer_of(call: Call[T]) -> tuple[T, float] | ServiceError:
            async with gate:
                try:
                    with deadline(patience_s):
                        # a transport knows the deadline
                        async with asyncio.timeout(None if target.transport else patience_s):
                            result = await clocked(call())
                except TimeoutError:
                    result = ServiceTimeout("")
            if not isinstance(result, ServiceTimeout):
                return result
            setting = "`judge_timeout_s`" if service.startswith(JUDGE) else "`rag.timeout_s`"
            text = f"{service} did not answer within {patience_s:g} s. Check its log, or raise {setting}."
            return ServiceTimeout(text, f"{service}_timeout")

        return await asyncio.gather(*map(answer_of, target.calls))

    loads = await asyncio.gather(*(put_load(name, target) for name, target in targets.items()))
    return dict(zip(targets, loads, strict=True))


async def _drop_failing(targets: dict[str, Target[T]], places: Mapping[str, str], findings: Findings) -> None:
    """Call each service once. Raises the error of one that training needs, or the first one if all fail."""
    first = {name: dataclasses.replace(target, calls=target.calls[:1]) for name, target in targets.items()}
    loads = await _put_loads(first)
    failed = {name: result for name, [result] in loads.items() if isinstance(result, ServiceError)}
    add_places(failed, places)
    for name, error in failed.items():
        instead = targets.pop(name).instead
        if instead is None or len(failed) == len(loads):
            raise error
        findings.add(str(error), instead)
    for target in targets.values():
        if target.transport is not None:
            target.transport.drain_traffic()


def _report(
    findings: Findings, name: str, target: Target[T], results: Results[T], plan: "Plan", needed: bool
) -> list[T]:
    """Add the metrics of a load test, which fails if training needs this service and would skip such a batch. Returns
    the answers."""
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
    text = f"{name}: {len(errors)} of {len(results)} calls failed at a concurrency of {in_flight} "
    text += f"({codes or 'none'}), and {traffic['overloads']} requests were rejected with 429."
    is_failure = needed and len(answered) < least * len(results)
    text += f" Training skips a batch with fewer than {least:.0%} of its rewards." if is_failure else ""
    if errors or traffic["overloads"]:
        text += f" The first failure: {errors[0]}" if errors else ""
        findings.add(text, "Fix the service, or lower `max_concurrency`.", is_failure=is_failure)
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
    alone = None if plan.reward.reference_weighed else "The judge then scores answers without a reference."
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
                remedy = f"Lower `rag.score_threshold` ({service.score_threshold:g}), or check the service's index."
                findings.add(f"{name}: {without} of {len(answered)} answers lack passages.", remedy)
    finally:
        await answers.aclose()


# The judge


def _rubrics(plan: "Plan") -> dict[str, str]:
    """Every weighted rubric, with the first branch that it scores."""
    scoring = plan.reward.scoring
    return {rubric: branch for branch in reversed([*scoring.weights]) for rubric in scoring.rubrics(branch).values()}


def _judge_targets(
    judge: Judge, plan: "Plan"
) -> tuple[dict[str, Target[Sequence[Verdict]]], list[list[JudgedSample]]]:
    """The targets by service name, and the samples of each call, which are the same for all judges."""
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
    else:  # the user's own judge chooses the order of the answers
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
        targets[name] = Target(transport, min(verdicts, most), patience_s, calls, "The other providers take over.")
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
    """`orders`: the judge's, if it judges groups. `times`: the verdicts per separately judged answer."""
    setting, times = ("judge_mode.orders", orders) if orders else ("judge_mode.repeats", times)
    share = noise.share(times)
    figures = {**dataclasses.asdict(noise), "noise_share": share}
    findings.figures |= {f"{name}_{what}": value for what, value in figures.items()}
    if noise.spread_sd is not None and noise.spread_sd < FLAT:
        text = f"{name} does not distinguish the built-in set's right and wrong answers: their scores have a standard "
        findings.add(f"{text}deviation of {noise.spread_sd:.3f}.", "Check the rubrics and the judge's model.")
    elif share is not None and share > NOISY:
        text = f"{name} is noisy: {share:.0%} of the variance of a group's scores is noise."
        findings.add(text, f"Raise `{setting}` ({times}), choose another model, or write a clearer rubric.")
    gap, error = noise.order_gap, noise.order_gap_error or 0.0
    if gap is not None and abs(gap) >= max(BIASED, 2 * error):
        direction = "higher" if gap > 0 else "lower"
        where = "in the first half of its group" if orders else "before the reference"
        remedy = "" if times % 2 == 0 else f"Set `{setting}: 2` for a verdict in each order."
        findings.add(f"{name} has a position bias: it scores a candidate {abs(gap):.2f} {direction} {where}.", remedy)
