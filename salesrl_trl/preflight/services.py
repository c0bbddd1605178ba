"""The stages `rag` and `judge`: do the services answer, in time and in form?

Owns which calls are made, and what their answers mean for training. Refuses to own:
- addresses, keys and model names (`checks.addresses`, `checks.reward`);
- the form of an answer (`reward.rag.rag_client`, `reward.judge.verdict`);
- the calls themselves (`load`), and a judge's noise as a figure (`reward.judge.noise`).
"""

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from salesrl_trl.build.assembly import budget_of, build_services
from salesrl_trl.build.checks.reward import JUDGE, check_judges, check_retrieval
from salesrl_trl.config import RewardConfig
from salesrl_trl.errors import JudgeInvalid, ServiceError
from salesrl_trl.preflight.load import Load, put_load, report_load, under_load
from salesrl_trl.preflight.simulation.hints import limits_of
from salesrl_trl.preflight.stage import Findings
from salesrl_trl.reward.cache import AnswerStore
from salesrl_trl.reward.judge.base import Judge, check_verdict
from salesrl_trl.reward.judge.judge_client import JudgeClient
from salesrl_trl.reward.judge.noise import MIN_CALLS, JudgedSample, Noise, noise_of, samples, widest_gap
from salesrl_trl.reward.judge.provider import ProviderClient
from salesrl_trl.reward.rag.rag_answers import RagAnswers
from salesrl_trl.reward.service.budget import Budget
from salesrl_trl.reward.service.transport import Transport
from salesrl_trl.reward.warm_up import add_places
from salesrl_trl.types import Answer, Verdict

if TYPE_CHECKING:
    from salesrl_trl.build.plan import Plan

T = TypeVar("T")

FEWEST_CALLS, MOST_CALLS = 32, 128
"""Bounds of the calls to each service if `preflight_calls` is not given. The standard error of a noise is a sixth of
it from 32 verdicts, a fifteenth from 128."""
NOISY = 0.1
"""From this share of noise in the variance of a group's scores on, a note says so."""
FLAT = 0.02
"""A judge whose scores of right and wrong answers spread less does not tell them apart."""
BIASED = 0.05
"""From this gap on a note says that the order of the answers moves a score."""
FAR_APART = 0.1
"""From this gap on a note says that two judges score the same answers differently."""
MOST_REPEATS = 8
"""Most `judge_repeats` that a note advises."""

FUNCTIONS_SCORE = "`reward_funcs` score, without a RAG service and a judge"


class RagStage:
    """Both endpoints answer the rows' questions with passages, at the load of a step."""

    name = "rag"
    needs: tuple[str, ...] = ("config",)

    def run(self, plan: "Plan") -> Findings:
        if not plan.config.reward.uses_services:
            return Findings(skipped=FUNCTIONS_SCORE)
        findings = Findings()
        for note in check_retrieval(plan.config.reward, plan.reward):
            findings.note(note)
        if _measures(plan):
            asyncio.run(_examine_rag(plan, findings))
        return findings


class JudgeStage:
    """Judges give valid verdicts at the load of a step. How far do verdicts on the same answer differ?"""

    name = "judge"
    needs: tuple[str, ...] = ("config",)

    def run(self, plan: "Plan") -> Findings:
        if not plan.config.reward.uses_services:
            return Findings(skipped=FUNCTIONS_SCORE)
        findings, rubrics = Findings(), _rubrics(plan)
        if not rubrics:
            return Findings(skipped="no branch weighs a judge")
        for note in check_judges(plan.config.reward, plan.reward):
            findings.note(note)
        if _measures(plan):
            asyncio.run(_examine_judge(plan, rubrics, findings))
        return findings


def _measures(plan: "Plan") -> bool:
    """Whether this process puts the load of all processes on the services: the first one does, in a preflight."""
    if plan.in_depth:
        _ = plan.addresses  # the processes start embedded services together
    return plan.in_depth and plan.config.training.process_index == 0


def calls_of(config: RewardConfig, in_flight: int) -> int:
    """The calls to a service: `preflight_calls`, or as many as a step makes at once, within bounds."""
    if config.preflight_calls is not None:
        return config.preflight_calls
    return min(max(in_flight, FEWEST_CALLS), MOST_CALLS)


def _budget(plan: "Plan") -> Budget | None:
    """The run's own budget: what a preflight asks counts in its folder."""
    return budget_of(plan.config.reward, Path(plan.config.training.output_dir))


@dataclasses.dataclass(frozen=True)
class _Service(Generic[T]):
    """A service at the load of a step."""

    transport: Transport | None
    in_flight: int
    patience_s: float
    calls: Sequence[Callable[[], Awaitable[T]]]
    instead: str | None
    """What happens without this service; `None` if training needs it."""


async def _put_loads(services: Mapping[str, _Service[T]], config: RewardConfig) -> dict[str, Load[T]]:
    loads = (
        put_load(each.transport, each.calls, each.in_flight, each.patience_s, name, limits_of(name, config).timeout)
        for name, each in services.items()
    )
    return dict(zip(services, await asyncio.gather(*loads), strict=True))


async def _drop_failing(
    services: dict[str, _Service[T]], places: Mapping[str, str], config: RewardConfig, findings: Findings
) -> None:
    """Ask each service once. Raises the error of one that training needs, or of the first if all of them fail."""
    loads = await _put_loads(
        {name: dataclasses.replace(each, calls=each.calls[:1]) for name, each in services.items()}, config
    )
    failed = {name: load.errors[0] for name, load in loads.items() if load.errors}
    add_places(failed, places)
    for name, error in failed.items():
        instead = services.pop(name).instead
        if instead is None or len(failed) == len(loads):
            raise error
        findings.note(str(error), instead)


def _too_few(load: Load[T], plan: "Plan") -> bool:
    return len(load.answers) < plan.config.training.min_valid_reward_fraction * len(load.results)


def _report(findings: Findings, name: str, load: Load[T], plan: "Plan", needed: bool) -> None:
    """Add a load's figures. It fails the stage if training would skip such a batch, and needs this service."""
    words = report_load(findings, name, load, plan.config.reward)
    if not load.errors:
        return
    text = f"{words} ({load.codes}). The first failure: {load.errors[0]}"
    if needed and _too_few(load, plan):
        findings.fail(
            f"{text} Training skips a batch with fewer than {plan.config.training.min_valid_reward_fraction:.0%} of "
            "its rewards.",
            f"Mend the service, or ask it for less at once ({limits_of(name, plan.config.reward).concurrency}).",
        )
    else:
        findings.note(text)


# RAG


async def _examine_rag(plan: "Plan", findings: Findings) -> None:
    config, training = plan.config.reward, plan.config.training
    budget = _budget(plan)
    rag, _ = build_services(under_load(config), plan.reward, *plan.addresses, budget=budget)
    kept = (AnswerStore(most=0), AnswerStore(most=0))
    answers = RagAnswers(rag, config.rag_score_threshold, config.rag_top_k, config.action_format(), *kept)
    batch, most, patience_s = training.generation_batch_size, config.rag_max_concurrency, config.rag_timeout_s
    completions, prompts = min(batch, most), min(max(batch // training.num_generations, 1), most)
    count = calls_of(config, completions)
    rows = list(itertools.islice(itertools.cycle(plan.train_rows), max(count, 1)))
    ask_8b = [partial(answers.ask_8b, row, answers.plain_action(row.conversation[-1].content)) for row in rows]
    ask_32b = [partial(answers.ask_32b, row) for row in rows[: max(count // training.num_generations, prompts)]]
    alone = None if plan.reward.reference_weighed else "Without a reference the judge scores each answer alone."
    (name_8b, transport_8b), (name_32b, transport_32b) = rag.transports.items()
    services: dict[str, _Service[Answer]] = {
        name_8b: _Service(transport_8b, completions, patience_s, ask_8b, None),
        name_32b: _Service(transport_32b, prompts, patience_s, ask_32b, alone),
    }
    try:
        await _drop_failing(services, dict.fromkeys(services, f"at {rag.identity}"), config, findings)
        if count == 0:
            return
        for name, load in (await _put_loads(services, config)).items():
            _report(findings, name, load, plan, needed=services[name].instead is None)
            await _report_passages(findings, name, load, answers, plan)
    finally:
        await answers.aclose()
        if budget is not None:
            budget.settle()


async def _report_passages(
    findings: Findings, name: str, load: Load[Answer], answers: RagAnswers, plan: "Plan"
) -> None:
    without = sum(not answer.passages for answer in load.answers)
    findings.figures[f"{name}_without_passages"] = without
    if 2 * without <= len(load.answers):
        return
    text = f"{name}: {without} of {len(load.answers)} answers have no passage."
    if name == next(iter(answers.backend.transports)) and not await answers.index_has_some(plan.train_rows[0]):
        findings.fail(
            f"{text} The first row finds none without a threshold either. Expected some: without passages a "
            "completion is not scored (`no_passages`).",
            "Look whether the service's index is loaded, and whether it knows the rows' `tenant_id`.",
        )
    else:
        threshold = plan.config.reward.rag_score_threshold
        findings.note(text, f"Lower `rag_score_threshold` ({threshold:g}) if the index knows the rows' subjects.")


# The judge


_Asked = tuple[Transport | None, int, Callable[[JudgedSample], Awaitable[Verdict]]]
"""A provider's transport, its calls in flight, and how it is asked. A judge of one's own has no transport."""


def _rubrics(plan: "Plan") -> dict[str, str]:
    """Every rubric that is weighed, with the first branch that it scores."""
    scoring = plan.reward.scoring
    return {rubric: branch for branch in reversed([*scoring.weights]) for rubric in scoring.rubrics(branch).values()}


async def _examine_judge(plan: "Plan", rubrics: Mapping[str, str], findings: Findings) -> None:
    config = plan.config.reward
    budget = _budget(plan)
    _, judge = build_services(under_load(config), plan.reward, *plan.addresses, budget=budget)
    scoring = plan.reward.scoring
    verdicts = plan.config.training.generation_batch_size * config.judge_repeats
    verdicts *= max(len(scoring.rubrics(branch)) for branch in scoring.weights)
    asked = _providers(judge, config, verdicts)
    calls = max(calls_of(config, in_flight) for _, in_flight, _ in asked.values())
    planned = samples(rubrics, config.action_format(), max(calls, MIN_CALLS))
    if not isinstance(judge, JudgeClient):  # it reads the answers in an order of its own
        planned = [dataclasses.replace(each, candidate_first=True) for each in planned]
    patience_s = max([config.judge_timeout_s, *(each.timeout_s or 0.0 for each in config.parsed_judge_providers())])
    instead = "Its verdicts go to the other providers."
    services = {
        name: _Service(transport, in_flight, patience_s, [partial(ask, sample) for sample in planned], instead)
        for name, (transport, in_flight, ask) in asked.items()
    }
    try:
        await _drop_failing(services, judge.places, config, findings)
        if calls == 0:
            return
        loads = await _put_loads(services, config)
        scored: dict[str, list[tuple[JudgedSample, float]]] = {}
        hopeless = all(_too_few(load, plan) for load in loads.values())
        for name, load in loads.items():
            _report(findings, name, load, plan, needed=hopeless)
            invalid = sum(isinstance(error, JudgeInvalid) for error in load.errors)
            findings.figures[f"{name}_invalid_share"] = invalid / len(load.results)
            scored[name] = [
                (sample, result[0].candidate)
                for sample, result in zip(planned, load.results, strict=True)
                if not isinstance(result, ServiceError)
            ]
            _report_noise(findings, name, noise_of(scored[name]), config)
        _report_judges(findings, scored)
        usage = judge.drain_usage().values()
        findings.figures |= {
            "judge_tokens": sum(each.prompt_tokens + each.completion_tokens for each in usage),
            "judge_usd": sum(each.usd for each in usage),
        }
    finally:
        await judge.aclose()
        if budget is not None:
            budget.settle()


def _providers(judge: Judge, config: RewardConfig, verdicts: int) -> dict[str, _Asked]:
    """By service name, how a provider is asked. Each has its share of a step's verdicts, a mere fallback has all."""
    if not isinstance(judge, JudgeClient):
        return {JUDGE: (None, min(verdicts, config.judge_max_concurrency), partial(_ask_own, judge))}
    clients = list(judge.providers.values())
    weights = sum(client.settings.weight for client in clients)
    asked: dict[str, _Asked] = {}
    for client in clients:
        transport = client.settings.transport
        share = math.ceil(verdicts * (client.settings.weight / weights or 1))
        in_flight = min(share, limits_of(transport.service, config).cap)
        asked[transport.service] = (transport, in_flight, partial(_ask, judge, client))
    return asked


async def _ask(judge: JudgeClient, client: ProviderClient, sample: JudgedSample) -> Verdict:
    material = judge.material(sample.rubric, sample.row, sample.action, sample.candidate, sample.reference)
    return await client.ask(material, candidate_first=sample.candidate_first, patient=True)


async def _ask_own(judge: Judge, sample: JudgedSample) -> Verdict:
    verdict = await judge.judge(sample.rubric, sample.row, sample.action, sample.candidate, sample.reference)
    check_verdict(True, verdict)
    return verdict


def _report_noise(findings: Findings, name: str, noise: Noise, config: RewardConfig) -> None:
    share = noise.share(config.judge_repeats)
    figures = {**dataclasses.asdict(noise), "noise_share": share}
    findings.figures |= {f"{name}_{what}": value for what, value in figures.items()}
    if noise.spread_sd is not None and noise.spread_sd < FLAT:
        findings.note(
            f"{name} scores right and wrong answers of the packaged set alike: their scores have a standard deviation "
            f"of {noise.spread_sd:.3f}. Expected {FLAT} or more: from equal scores nothing is learned.",
            "Look at the rubrics and at the judge's model.",
        )
    elif share is not None and noise.verdict_sd is not None and share > NOISY:
        findings.note(
            f"{name} is noisy: its verdicts on one answer have a standard deviation of {noise.verdict_sd:.3f}, those "
            f"on right and wrong answers {noise.spread_sd:.3f}. So {share:.0%} of the variance of a group's scores is "
            "noise, and more in groups of similar answers.",
            _advice(noise, config),
        )
    gap, error = noise.order_gap, noise.order_gap_error or 0.0
    if gap is not None and abs(gap) >= max(BIASED, 2 * error):
        findings.note(
            f"{name} scores a candidate {abs(gap):.2f} {'higher' if gap > 0 else 'lower'} where it stands before the "
            "reference.",
            "" if config.judge_repeats % 2 == 0 else "Set `judge_repeats: 2`, for a verdict in each order.",
        )


def _advice(noise: Noise, config: RewardConfig) -> str:
    for repeats in range(2 * (config.judge_repeats // 2) + 2, MOST_REPEATS + 1, 2):
        if (share := noise.share(repeats)) is not None and share <= NOISY:
            return f"Set `judge_repeats: {repeats}`: it brings the share of noise to {share:.0%}."
    return "Choose another model, write a clearer rubric, or lower the `temperature` of a provider that has one."


def _report_judges(findings: Findings, scored: Mapping[str, Sequence[tuple[JudgedSample, float]]]) -> None:
    gap = widest_gap(scored)
    if gap is None:
        return
    findings.figures["judge_providers_gap"] = gap
    if gap >= FAR_APART:
        findings.note(
            f"The judges' mean scores of the same answers differ by up to {gap:.2f}. Different judges may score the "
            "answers of one group.",
            "Give one of them `weight: 0`, as a fallback, or choose models that agree.",
        )
