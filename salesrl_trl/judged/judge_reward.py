"""The built-in judge reward: custom stages -> judge -> further stages -> score.

`chain.SalesReward` extends it and obtains the answer to score from an action.
"""

import asyncio
import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from pydantic import TypeAdapter

from salesrl_trl import types
from salesrl_trl.data.rows import parse_row, shape
from salesrl_trl.errors import ConfigError, DataError, JudgeInvalid, ServiceError
from salesrl_trl.judged.cache import AnswerStore, Cache, cache_key
from salesrl_trl.judged.judge import Judge, check_verdicts, judged
from salesrl_trl.judged.meter import SECOND_JUDGE
from salesrl_trl.judged.parsing import is_empty_text
from salesrl_trl.judged.scoring import Case, Missing, RewardStage, Scoring
from salesrl_trl.names import Stage
from salesrl_trl.reward import scorer
from salesrl_trl.reward.batch import BatchReport, Sample, SampleLines
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.reward.together import Member, Together
from salesrl_trl.service.event_loop import deadline, remaining_s
from salesrl_trl.service.transport import Transport
from salesrl_trl.telemetry.completion_record import CompletionRecord, Judged, noted_in
from salesrl_trl.types import Action, Answer, Criterion, InvalidAction, Outcome, Reward, SalesRow, Verdict, missing

Known: TypeAlias = Case | InvalidAction | Missing  # a completion's case, or why it is rejected
Asked: TypeAlias = tuple[Judge, Case]
Results: TypeAlias = dict[str, Verdict | ServiceError]  # by component
_VERDICTS = TypeAdapter(Sequence[Verdict])  # as stored
COLUMNS = ("prompt", "conversation", "branch", "id", "documents", "reference", "criteria")
"""Columns that `JudgeReward` reads. `reference`: a known good answer. `criteria`: a list of texts or of
`{text, weight, name}`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondJudge:
    judge: Judge
    settings: scorer.MeterSettings


class JudgeReward(scorer.Scorer):
    """The built-in judge as a reward function. It scores the completion itself, without RAG service or action.

    Args:
        judge (`Judge`):
            The judge: `JudgeClient` for services, or your own.
        scoring (`Scoring`):
            Combines components into the reward.
        deadline_s (`float`, *optional*, defaults to `300.0`):
            Seconds to score a completion, from its start. Later ones are cancelled and unscored, with the reason
            `"deadline"`.
        stages (`Sequence[RewardStage]`, *optional*):
            Custom stages, in order; those after the judge run last.
        answers (`AnswerStore`, *optional*):
            Stores verdicts. In memory by default.
        lines (`SampleLines`, *optional*), records (`bool`, *optional*, defaults to `False`):
            As in `Scorer`.
        second (`SecondJudge`, *optional*):
            The second judge of the drift monitor, which is off without one.

    Raises:
        `ConfigError`: the judge is not a `Judge`, a stage is not a `RewardStage`, two stages share a name, or no stage
            adds a weighted component.
    """

    __name__ = types.JUDGE  # the name in TRL's reward metrics

    def __init__(
        self, judge: Judge, scoring: Scoring, *, deadline_s: float = scorer.DEADLINE_S,
        stages: Sequence[RewardStage] = (), answers: AnswerStore | None = None, lines: SampleLines | None = None,
        records: bool = False, second: SecondJudge | None = None,
    ) -> None:  # fmt: skip
        super().__init__(deadline_s)
        self.records = records
        self._ahead_record = CompletionRecord()  # calls that no completion waits for
        self.lines = lines or self.lines
        if not isinstance(judge, Judge):
            raise ConfigError(f"the judge of the reward is a {type(judge).__name__}. Expected a `Judge`.")
        self._second = second
        self._judges = (judge,) if second is None else (judge, second.judge)
        takes_over = second is not None and second.settings.on_alarm == SECOND_JUDGE
        self._rewarding = self._judges if takes_over else (judge,)
        self._store = answers or AnswerStore()
        self._verdicts = Cache(self._store, _VERDICTS)
        self._per = scorer.Per.GROUP if judge.orders else scorer.Per.COMPLETION
        self._together = Together(self._per, self._verdicts_of)
        self._judged_singly = 0
        self._scoring = scoring.with_stages(stages)
        self._stages = tuple(stages)

    @property
    def names(self) -> scorer.RewardNames:
        return scorer.RewardNames(
            functions={self.own_name: self.own_name},
            together=self._per,
            judges_groups=self._per is scorer.Per.GROUP,
            columns=frozenset((*COLUMNS, scorer.METER)),
            needs=needs_of(self._scoring),
            at_once=min(slots_of(judge.transports) for judge in self._rewarding),
            providers=tuple(name for judge in self._judges for name in judge.provider_names),
            components=self._scoring.judged_names,
            stages=tuple(stage.name for stage in self._stages),
            services=tuple(self._transports()),
            places={name: place for judge in self._judges for name, place in judge.places.items()},
            required=tuple(tuple(judge.places) for judge in self._rewarding),  # one of its providers
            meter=None if self._second is None else self._second.settings,
        )

    async def drain(self) -> BatchReport:
        # bias metrics cover one judge: the first, while it scores rewards
        records = [judge.drain_records() for judge in self._judges]
        drained = BatchReport(
            usage={name: use for judge in self._judges for name, use in judge.drain_usage().items()},
            traffic={name: transport.drain_traffic() for name, transport in self._transports().items()},
            judged_singly=self._judged_singly,
            records=next(filter(None, records[: len(self._rewarding)]), ()),
            cache_hits={"answers": self._verdicts.hits, "references": 0},
            calls=self._ahead_record.drain_calls(),
        )
        self._verdicts.hits = self._judged_singly = 0
        if self.budget is not None:
            self.budget.settle()
        return drained

    async def warm_up(self) -> dict[str, float | ServiceError]:
        row = SalesRow(row_id="warm-up", branch=next(iter(self._scoring.weights)), prompt="What is 1 + 1?")
        with deadline(self.deadline_s):
            results = await self._first_questions(row, types.NOTHING_WRITTEN)
        await self.drain()  # keep the warm-up out of the first step's metrics
        add_places(results, self.names.places)
        return results

    async def _first_questions(self, row: SalesRow, action: Action) -> dict[str, float | ServiceError]:
        asked = await asyncio.gather(*(judge.warm_up(row, action, _answer("2")) for judge in self._judges))
        return {name: result for results in asked for name, result in results.items()}

    async def aclose(self) -> None:
        await self._verdicts.aclose()
        for judge in self._judges:
            await judge.aclose()
        for stage in self._stages:
            await stage.aclose()
        await self._store.aclose()
        await super().aclose()

    def _transports(self) -> Mapping[str, Transport]:
        return {name: transport for judge in self._judges for name, transport in judge.transports.items()}

    async def score(self, sample: Sample, stages: StageTimes) -> Reward:
        if scorer.METER in sample.row:
            return await self._judged_for_meter(sample, stages)
        record = stages.own_record if self.records else None
        with self._together.entered(sample) as member, noted_in(record):
            if sample.failed is not None:
                return missing(Outcome.INFRA, sample.failed)
            judge = self._judges[sample.by_second]
            try:
                outcome = await _passed(self._stages, await self._case(sample, stages), stages, after_judge=False)
                if isinstance(outcome, Case):
                    judged_case = await self._judged(member, judge, outcome, stages)
                    outcome = await _passed(self._stages, judged_case, stages, after_judge=True)
                if isinstance(outcome, Missing):
                    return missing(Outcome.INFRA, outcome.reason)
                if isinstance(outcome, InvalidAction):
                    return self._scoring.score_invalid(outcome)
                return _by_criteria(self._scoring.score(outcome), outcome)
            except ServiceError as error:
                return missing(Outcome.INFRA, error.code)

    async def _judged_for_meter(self, sample: Sample, stages: StageTimes) -> Reward:
        """The second judge's score of a completion, bypassing the cache."""
        assert self._second is not None
        judge = self._second.judge
        with noted_in(self._ahead_record if self.records else None):
            try:
                case = await self._case(sample, stages)
                if not isinstance(case, Case):
                    return missing(Outcome.INFRA, case.reason)
                asked = judge.judge(case.row.branch, case.row, case.action, case.answer, case.reference)
                verdict = await stages.timed(asked, Stage.JUDGE)
            except ServiceError as error:
                return missing(Outcome.INFRA, error.code)
        return Reward(outcome=Outcome.OK, value=verdict.candidate)

    async def _case(self, sample: Sample, stages: StageTimes) -> Known:
        try:
            row, reference = judged_row(sample.row, [*self._scoring.weights])
        except DataError as error:
            self.faults.log_once(f"a row can't be judged: {error}")
            return Missing(reason="row_not_judgeable")
        if is_empty_text(sample.text):
            return InvalidAction(reason="hollow_answer")
        answer = None if reference is None else _answer(reference)
        return Case(row=row, action=types.NOTHING_WRITTEN, answer=_answer(sample.text), reference=answer)

    async def _judged(self, member: Member[Asked, Results], judge: Judge, case: Case, stages: StageTimes) -> Case:
        """Request all the branch's verdicts concurrently, on this case or its whole group."""
        if self._per is scorer.Per.GROUP:
            try:
                results = await member.result((judge, case))
            finally:
                if self.records:
                    member.note(stages.own_record, self._per.value)
            stages.record(Stage.JUDGE, member.started)
        else:
            [results] = await stages.timed(self._verdicts_of([(judge, case)]), Stage.JUDGE)
        if stages.completion_record is not None:
            stages.completion_record.verdicts |= {
                name: Judged(reason=result.code) if isinstance(result, ServiceError) else Judged(
                    candidate=result.candidate, reference=result.reference, reason=result.reason,
                    provider=result.provider,
                )
                for name, result in results.items()
            }  # fmt: skip
        failed = [result for result in results.values() if isinstance(result, ServiceError)]
        outcome = Outcome.JUDGE_INVALID if failed and isinstance(failed[0], JudgeInvalid) else Outcome.INFRA
        return replace(
            case,
            verdicts={name: None if isinstance(result, ServiceError) else result for name, result in results.items()},
            failure=(outcome, failed[0].code) if failed else None,
        )

    async def _verdicts_of(self, asked: Sequence[Asked]) -> list[Results]:
        """Their judge's verdict on each. Cases with one row and reference are judged together, equal ones once."""
        judge, cases = asked[0][0], [case for _, case in asked]  # a batch has one judge
        results: list[Results] = [{} for _ in cases]
        wanted = [self._scoring.rubrics(case.row.branch) for case in cases]
        groups: dict[tuple[str, str, str], dict[str, list[int]]] = {}  # equal cases, by row and reference
        for place, case in enumerate(cases):
            blank = replace(case, action=types.NOTHING_WRITTEN, answer=_answer(""))
            for name, rubric in wanted[place].items():
                group = groups.setdefault((name, rubric, cache_key(_material(rubric, blank))), {})
                group.setdefault(cache_key(_material(rubric, case)), []).append(place)

        async def judge_all(name: str, rubric: str, group: Mapping[str, list[int]]) -> None:
            places = [group[key] for key in sorted(group)]  # equal texts make equal calls
            said = await self._judged_or_errors(judge, rubric, [cases[equal[0]] for equal in places])
            for equal, result in zip(places, said, strict=True):
                for place in equal:
                    results[place][name] = result

        await asyncio.gather(*(judge_all(name, rubric, group) for (name, rubric, _), group in groups.items()))
        return [{name: said[name] for name in names} for said, names in zip(results, wanted, strict=True)]

    async def _judged_or_errors(
        self, judge: Judge, rubric: str, cases: Sequence[Case]
    ) -> Sequence[Verdict | ServiceError]:
        """Verdicts on different answers to one row. If the joint call fails or uses half the remaining time, they are
        judged one by one."""
        if len(cases) > 1:
            half_s = remaining_s() / 2
            with deadline(half_s), contextlib.suppress(ServiceError, TimeoutError):
                async with asyncio.timeout(half_s):  # a custom judge may ignore the deadline
                    return await self._ask(judge, rubric, cases)
            self._judged_singly += len(cases)
        return await asyncio.gather(*(self._alone(judge, rubric, case) for case in cases))

    async def _alone(self, judge: Judge, rubric: str, case: Case) -> Verdict | ServiceError:
        try:
            return (await self._ask(judge, rubric, [case]))[0]
        except ServiceError as error:
            return error

    async def _ask(self, judge: Judge, rubric: str, cases: Sequence[Case]) -> Sequence[Verdict]:
        row, reference = _row(rubric, cases[0].row), cases[0].reference
        candidates = [(case.action, case.answer) for case in cases]
        materials = (_material(rubric, case) for case in cases)
        return await self._verdicts.get(
            cache_key(judge.identity(rubric), *materials, *([judge.orders] if len(cases) > 1 else [])),
            lambda: judged(judge, rubric, row, candidates, reference),
            functools.partial(check_verdicts, len(cases), reference is not None),
        )


def _row(rubric: str, row: SalesRow) -> SalesRow:
    return row if rubric == row.branch else replace(row, criteria=())  # further rubrics judge the answer as a whole


def _material(rubric: str, case: Case) -> tuple[object, ...]:
    """Everything but the judge that determines a case's verdict, as JSON values."""
    row, reference = _row(rubric, case.row), case.reference
    texts = (case.answer.text, None if reference is None else reference.text)
    criteria = [asdict(criterion) for criterion in row.criteria]
    return (row.branch, row.context, row.documents, case.action.as_dict(), texts, *criteria)


def _by_criteria(reward: Reward, case: Case) -> Reward:
    verdict, criteria = case.verdicts.get(types.JUDGE), case.row.criteria
    if verdict is None or not verdict.criteria:  # a custom judge may score the answer as a whole
        return reward
    scored = [*zip(criteria, verdict.criteria, strict=True)]
    parts = {criterion.name or f"criterion_{number}": score for number, (criterion, score) in enumerate(scored, 1)}
    metrics = tuple((f"rewards/{types.JUDGE}/{each.name}", score) for each, score in scored if each.name)
    return replace(reward, components={**parts, **reward.components}, metrics=metrics)


async def _passed(through: Sequence[RewardStage], known: Known, stages: StageTimes, *, after_judge: bool) -> Known:
    for stage in through:
        if isinstance(known, Case) and bool(stage.after_judge) is after_judge:
            known = stage.of(known, await stages.timed(stage.run(known), stage.name))
    return known


def add_places(results: Mapping[str, object], places: Mapping[str, str]) -> None:
    for name, result in results.items():
        if isinstance(result, ServiceError):
            result.args = (f"{result} ({name}: {places[name]})",)


def judged_row(columns: Mapping[str, object], branches: Sequence[str]) -> tuple[SalesRow, str | None]:
    """A dataset row in the judge's format, and its reference answer. Raises `DataError` for a malformed column,
    without quoting it."""
    reference, criteria = reference_and_criteria(columns)
    given = {name: columns.get(name) for name in COLUMNS}
    record = {name: value for name, value in given.items() if value not in (None, "", [])}  # [] is a table's gap
    if [*branches] == [types.ALL]:
        record["branch"] = types.ALL
    row = parse_row(record, place if isinstance(place := columns.get("row"), int) else 0, branches, "the dataset")
    return replace(row, criteria=criteria, columns={}), reference


def reference_and_criteria(columns: Mapping[str, Any]) -> tuple[str | None, tuple[Criterion, ...]]:
    """Parse these two columns of a row. Raises `DataError` as `judged_row` does."""
    reference, given_criteria = columns.get("reference"), columns.get("criteria")
    if reference is not None and not isinstance(reference, str):
        raise DataError(f"`reference` is {shape(reference)}. Expected a text, or nothing.")
    expected = "Expected a list of texts, or of {text, weight, name}."
    if given_criteria is not None and (not isinstance(given_criteria, Sequence) or isinstance(given_criteria, str)):
        raise DataError(f"`criteria` is {shape(given_criteria)}. {expected}")
    criteria = []
    for entry in given_criteria or ():
        try:
            given = {"text": entry} if isinstance(entry, str) else entry
            fields: dict[str, Any] = {name: part for name, part in given.items() if part is not None}
            criteria.append(Criterion(**fields))
        except (AttributeError, TypeError, ValueError):
            raise DataError(f"`criteria` holds {shape(entry)}. {expected}") from None
    return reference or None, tuple(criteria)


def needs_of(scoring: Scoring) -> tuple[scorer.Needs, ...]:
    """Columns required to judge the policy's own answers."""
    needs = scorer.Needs(function=types.JUDGE, per=scorer.Per.COMPLETION, columns=frozenset({"reference"}))
    return (needs,) if any("margin" in weights for weights in scoring.weights.values()) else ()


def _answer(text: str) -> Answer:
    return Answer(text=text, passages=(), took_ms=0.0)


def slots_of(transports: Mapping[str, Transport]) -> int:
    """The highest concurrency limit among interchangeable services."""
    return max((transport.max_concurrency for transport in transports.values()), default=scorer.AT_ONCE)
