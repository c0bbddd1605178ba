"""The reward of a completion: parse -> RAG 8B and 32B -> stages of one's own -> judge -> further stages -> score.

Owns the order of the stages, what every failure means, and the first question to every service.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TypeAlias, TypeVar

from salesrl_trl.errors import ConfigError, JudgeInvalid, ServiceError
from salesrl_trl.names import Stage
from salesrl_trl.recording.completion_record import CompletionRecord, Judged, noted_in
from salesrl_trl.reward.batch import BatchReport, Sample
from salesrl_trl.reward.cache import AnswerStore, Cache, cache_key
from salesrl_trl.reward.judge.judge_interface import Judge, check_verdict
from salesrl_trl.reward.judge.verdict import verdict_from_json
from salesrl_trl.reward.parsing import is_empty_text, parse_action
from salesrl_trl.reward.rag_answers import RagAnswers
from salesrl_trl.reward.rag_client import RagBackend, answer_to_json
from salesrl_trl.reward.sample_lines import SampleLines
from salesrl_trl.reward.scorer import AT_ONCE, RewardNames, Scorer
from salesrl_trl.reward.scoring import Scoring, missing
from salesrl_trl.reward.service.event_loop import clocked, deadline, remaining_s
from salesrl_trl.reward.service.transport import Transport
from salesrl_trl.reward.stage import Case, Missing, RewardStage
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.types import (
    DEFAULT_FORMAT,
    ActionFormat,
    Answer,
    Example,
    InvalidAction,
    Outcome,
    Reward,
    SalesRow,
    Verdict,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


Step: TypeAlias = Callable[[Case, StageTimes], Awaitable[Case | InvalidAction | Missing]]
"""A part of the chain behind the answers: from a case to what is known then, or to a refusal."""


class SalesReward(Scorer):
    """The packaged reward: both RAG endpoints, the judge, a score.

    Args:
        rows (`Sequence[SalesRow]`):
            All rows, addressed by the dataset's `row` column.
        rag (`RagBackend`):
            Both RAG endpoints.
        judge (`Judge`):
            The judge: `JudgeClient` for services, or one of your own.
        scoring (`Scoring`):
            The law of the reward.
        score_threshold (`float`):
            Passages below this normalised score in [0, 1] are left out.
        top_k (`int`):
            Most passages to retrieve.
        deadline_s (`float`):
            Seconds a completion may take from its start. What is not scored by then is cancelled and missing, reason
            `"deadline"`.
        stages (`Sequence[RewardStage]`, *optional*, defaults to none):
            Stages of your own, in their order, those behind the judge after those before it.
        answers (`AnswerStore`, *optional*):
            Keeps 8B answers and verdicts. In memory when not given.
        references (`AnswerStore`, *optional*):
            Keeps 32B answers, which do not depend on the policy. In memory when not given.
        action_format (`ActionFormat`, *optional*):
            What an action consists of.
        announces (`bool`, *optional*, defaults to `True`):
            Whether this is the process that logs what became of kept references.
        lines (`SampleLines`, *optional*):
            Logs what happens to single completions. Failures alone, at the level DEBUG, when not given.
        records (`bool`, *optional*, defaults to `False`):
            Whether answers, verdicts and calls are kept for the record of the run. They hold customers' texts.

    Raises:
        `ConfigError`: the judge is no `Judge`, a stage is no `RewardStage`, two stages have one name, or no stage adds
            a component that is weighed.
    """

    __name__ = "sales"  # TRL names the reward's metrics after it

    def __init__(
        self,
        rows: Sequence[SalesRow],
        rag: RagBackend,
        judge: Judge,
        scoring: Scoring,
        *,
        score_threshold: float,
        top_k: int,
        deadline_s: float,
        stages: Sequence[RewardStage] = (),
        answers: AnswerStore | None = None,
        references: AnswerStore | None = None,
        action_format: ActionFormat = DEFAULT_FORMAT,
        announces: bool = True,
        lines: SampleLines | None = None,
        records: bool = False,
    ) -> None:
        super().__init__(deadline_s)
        self._ahead_record = CompletionRecord() if records else None
        """Calls that no completion waits for."""
        self.lines = lines or self.lines
        if not isinstance(judge, Judge):
            raise ConfigError(f"the judge of the reward is a {type(judge).__name__}. Expected a `Judge`.")
        self._rows = rows
        self._format = action_format
        self._announces = announces
        self._rag = rag
        self._judge = judge
        self._stores = (answers or AnswerStore(), references or AnswerStore())
        self._answers = RagAnswers(rag, score_threshold, top_k, action_format, *self._stores)
        self._verdicts = Cache(self._stores[0], asdict, verdict_from_json)
        self._scoring = scoring.with_stages(stages)
        self._stages = tuple(stages)
        self._steps: tuple[Step, ...] = (
            *(functools.partial(_run, stage) for stage in stages if not stage.after_judge),
            self._judged,
            *(functools.partial(_run, stage) for stage in stages if stage.after_judge),
        )

    @property
    def names(self) -> RewardNames:
        return RewardNames(
            functions={self.own_name: self.own_name},
            columns=frozenset({"row"}),
            at_once=min(  # judges stand in for one another
                max((transport.max_concurrency for transport in transports.values()), default=AT_ONCE)
                for transports in (self._rag.transports, self._judge.transports)
            ),
            providers=self._judge.provider_names,
            components=self._scoring.component_names,
            stages=tuple(stage.name for stage in self._stages),
            services=tuple(self._transports()),
            places={**dict.fromkeys(self._rag.transports, f"at {self._rag.identity}"), **self._judge.places},
            # A run can go on without the 32B endpoint, and with one of the judges.
            required=(tuple(self._rag.transports)[:1], tuple(self._judge.places)),
        )

    async def prepare(self, rows: Iterable[Example]) -> None:
        """Ask for the 32B answers of these rows. After an error the next completion asks again, and reports it."""
        wanted = [self._rows[index] for index in dict.fromkeys(int(row["row"]) for row in rows)]
        with deadline(self.deadline_s), noted_in(self._ahead_record):
            fetched = [self._answers.fetch_reference(row) for row in wanted if self._scoring.rubrics(row.branch)]
            await asyncio.gather(*fetched, return_exceptions=True)

    async def drain(self) -> BatchReport:
        """As `Scorer.drain`. A call is counted in the next report, whichever batch in flight it was for."""
        answers, references = self._answers.answer_cache, self._answers.reference_cache
        drained = BatchReport(
            usage=self._judge.drain_usage(),
            traffic={
                name: {**transport.drain_traffic(), "slots": transport.slots}
                for name, transport in self._transports().items()
            },
            records=self._judge.drain_records(),
            cache_hits={"answers": answers.hits + self._verdicts.hits, "references": references.hits},
            calls=() if self._ahead_record is None else self._ahead_record.drain_calls(),
        )
        answers.hits = self._verdicts.hits = references.hits = 0
        if self.budget is not None:
            self.budget.settle()
        return drained

    async def warm_up(self) -> dict[str, float | ServiceError]:
        row, answers = self._rows[0], self._answers
        action = answers.plain_action(row.conversation[-1].content)
        with deadline(self.deadline_s):
            # 1. Both endpoints about the first row.
            of_8b, of_32b = await asyncio.gather(
                clocked(functools.partial(answers.ask_8b, row, action)),
                clocked(functools.partial(answers.ask_32b, row)),
            )
            results: dict[str, float | ServiceError] = {
                name: result if isinstance(result, ServiceError) else result[1]
                for name, result in zip(self._rag.transports, (of_8b, of_32b), strict=True)
            }
            # 2. The judge about their answer, if any branch needs one.
            if any(self._scoring.rubrics(branch) for branch in self._scoring.weights):
                known = [result[0] for result in (of_8b, of_32b) if not isinstance(result, ServiceError)]
                answer = known[0] if known else Answer(text="No answer.", passages=(), took_ms=0.0)
                results.update(await self._judge.warm_up(row, action, answer))
            # 3. Whether the index is empty.
            if not isinstance(of_8b, ServiceError) and not of_8b[0].passages:
                any_passage = await clocked(functools.partial(answers.index_has_some, row))
                if not isinstance(any_passage, ServiceError) and not any_passage[0] and self._announces:
                    logger.warning(
                        f"[RAG] {self._rag.identity} finds nothing for the first row, not even without a threshold: "
                        "look whether its index is loaded, and whether it knows the rows' tenant_id. Such rows are "
                        "not scored (`no_passages`)."
                    )
            # 4. Whether references that an earlier run kept still hold.
            if not isinstance(of_32b, ServiceError):
                judged = [row for row in self._rows if self._scoring.rubrics(row.branch)]
                line = await answers.compare_references(judged)
                if self._announces and line is not None:
                    text, is_warning = line
                    logger.log(logging.WARNING if is_warning else logging.INFO, f"[References] {text}")
        await self.drain()  # the first step's figures are its own
        add_places(results, self.names.places)
        return results

    async def aclose(self) -> None:
        await self._verdicts.aclose()
        await self._answers.aclose()
        await self._judge.aclose()
        for stage in self._stages:
            await stage.aclose()
        for store in self._stores:
            await store.aclose()
        if self.budget is not None:
            self.budget.settle()

    def _transports(self) -> dict[str, Transport]:
        return {**self._rag.transports, **self._judge.transports}

    async def score(self, sample: Sample, stages: StageTimes) -> Reward:
        record = None if self._ahead_record is None else stages.own_record
        with noted_in(record):
            # 1. Parse it. What is no action is the policy's own fault.
            began = time.perf_counter()
            action = parse_action(sample.text, self._format)
            stages.record(Stage.PARSE, began)
            if isinstance(action, InvalidAction):
                return self._scoring.score_invalid(action, stages.seconds)
            # 2. Ask both endpoints at the same time.
            row = self._rows[int(sample.row["row"])]
            if record is not None:
                record.action = action.as_dict()
            reference_asked = asyncio.ensure_future(self._reference_or_none(row, stages))
            try:
                answer = await stages.timed(self._answers.candidate(row, action), Stage.RAG_8B)
                self.lines.answer(row.row_id, Stage.RAG_8B, stages.seconds[Stage.RAG_8B], answer)
                if record is not None:
                    record.answer = answer_to_json(answer)
                # 3. Refuse an answer that says nothing, unless the index is at fault.
                if not answer.passages and not await self._answers.index_has_some(row):
                    return missing(Outcome.INFRA, "no_passages", stages.seconds)
                if is_empty_text(answer.text):
                    return self._scoring.score_invalid(InvalidAction(reason="hollow_answer"), stages.seconds)
                # 4. The stages of one's own and the judge. Each may refuse the case.
                case = Case(row=row, action=action, answer=answer, reference=await reference_asked)
                for step in self._steps:
                    result = await step(case, stages)
                    if isinstance(result, Missing):
                        return missing(Outcome.INFRA, result.reason, stages.seconds)
                    if isinstance(result, InvalidAction):
                        return self._scoring.score_invalid(result, stages.seconds)
                    case = result
                # 5. The number.
                return self._scoring.score(case, stages.seconds)
            except ServiceError as error:
                return missing(Outcome.INFRA, error.code, stages.seconds)
            finally:
                reference_asked.cancel()  # nobody needs it any more, so its error is not reported

    async def _reference_or_none(self, row: SalesRow, stages: StageTimes) -> Answer | None:
        """The reference answer, in half of the time that is left. Without it the judge scores the candidate alone."""
        if not self._scoring.rubrics(row.branch):
            return None
        with deadline(remaining_s() / 2):
            try:
                async with asyncio.timeout(remaining_s()):  # a call that others share may take longer
                    answer = await stages.timed(self._answers.reference(row), Stage.RAG_32B)
            except (ServiceError, TimeoutError) as error:
                reason = error.code if isinstance(error, ServiceError) else "deadline"
                self.lines.no_answer(row.row_id, Stage.RAG_32B, reason)
                return None
        self.lines.answer(row.row_id, Stage.RAG_32B, stages.seconds[Stage.RAG_32B], answer)
        if stages.completion_record is not None:
            stages.completion_record.reference = answer_to_json(answer)
        return answer

    async def _judged(self, case: Case, stages: StageTimes) -> Case:
        """Ask for all verdicts that the branch weighs at the same time."""
        wanted = self._scoring.rubrics(case.row.branch)
        asked = (_or_error(functools.partial(self._verdict, rubric, case)) for rubric in wanted.values())
        results = dict(zip(wanted, await stages.timed(asyncio.gather(*asked), Stage.JUDGE), strict=True))
        if stages.completion_record is not None:
            stages.completion_record.verdicts |= {
                name: Judged(candidate=None, reference=None, reason=result.code, provider="")
                if isinstance(result, ServiceError)
                else Judged(**asdict(result))
                for name, result in results.items()
            }
        verdicts = {name: None if isinstance(result, ServiceError) else result for name, result in results.items()}
        failed = next((result for result in results.values() if isinstance(result, ServiceError)), None)
        if failed is None:
            return replace(case, verdicts=verdicts)
        outcome = Outcome.JUDGE_INVALID if isinstance(failed, JudgeInvalid) else Outcome.INFRA
        return replace(case, verdicts=verdicts, failure=(outcome, failed.code))

    async def _verdict(self, rubric: str, case: Case) -> Verdict:
        row, reference = case.row, case.reference
        texts = (case.answer.text, None if reference is None else reference.text)
        material = (row.branch, row.context, row.documents, case.action.as_dict(), texts)
        return await self._verdicts.get(
            cache_key(self._judge.identity(rubric), material),
            lambda: self._judge.judge(rubric, row, case.action, case.answer, reference),
            functools.partial(check_verdict, reference is not None),
        )


async def _run(stage: RewardStage, case: Case, stages: StageTimes) -> Case | InvalidAction | Missing:
    return stage.of(case, await stages.timed(stage.run(case), stage.name))


async def _or_error(call: Callable[[], Awaitable[T]]) -> T | ServiceError:
    """Makes the call only when it runs. Cancelled before, it leaves no coroutine that was never awaited."""
    try:
        return await call()
    except ServiceError as error:
        return error


def add_places(results: Mapping[str, object], places: Mapping[str, str]) -> None:
    """Let each error's message say where its service is."""
    for name, result in results.items():
        if isinstance(result, ServiceError):
            result.args = (f"{result} ({name}: {places[name]})",)
