"""The built-in reward pipeline: parse -> RAG 8B and 32B, followed by `judge_reward`."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from salesrl_trl.errors import ServiceError
from salesrl_trl.judged.cache import AnswerStore
from salesrl_trl.judged.judge import Judge, seconds_or_error
from salesrl_trl.judged.judge_reward import JudgeReward, Known, SecondJudge, slots_of
from salesrl_trl.judged.parsing import is_empty_text, parse_action
from salesrl_trl.judged.rag_client import RagAnswers, RagBackend, kept
from salesrl_trl.judged.scoring import COMPONENTS, Case, Missing, RewardStage, Scoring
from salesrl_trl.names import Stage
from salesrl_trl.reward.batch import BatchReport, Sample, SampleLines
from salesrl_trl.reward.scorer import METER, RewardNames
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.service.event_loop import deadline, remaining_s
from salesrl_trl.service.transport import Transport
from salesrl_trl.telemetry.completion_record import noted_in
from salesrl_trl.types import DEFAULT_FORMAT, SALES, Action, ActionFormat, Answer, Example, InvalidAction, SalesRow


class SalesReward(JudgeReward):
    """The built-in reward: both RAG endpoints, the judge, a score.

    Args:
        rows (`Sequence[SalesRow]`):
            All rows, indexed by the dataset's `row` column.
        rag (`RagBackend`):
            Both RAG endpoints.
        score_threshold (`float`):
            Passages below this normalised score in [0, 1] are dropped.
        top_k (`int`):
            Maximum number of passages to retrieve.
        answers, references (`AnswerStore`, *optional*):
            Store 8B answers with verdicts, and policy-independent 32B answers. In memory by default.
        action_format (`ActionFormat`, *optional*):
            The action's fields.
        judge, scoring, deadline_s, stages, lines, records, second:
            As in `JudgeReward`.

    Raises:
        `ConfigError`: as `JudgeReward` does.
    """

    __name__ = SALES

    def __init__(
        self, rows: Sequence[SalesRow], rag: RagBackend, judge: Judge, scoring: Scoring, *, score_threshold: float,
        top_k: int, deadline_s: float, stages: Sequence[RewardStage] = (), answers: AnswerStore | None = None,
        references: AnswerStore | None = None, action_format: ActionFormat = DEFAULT_FORMAT,
        lines: SampleLines | None = None, records: bool = False, second: SecondJudge | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            judge, scoring, deadline_s=deadline_s, stages=stages, answers=answers, lines=lines, records=records,
            second=second,
        )  # fmt: skip
        self._rows = rows
        self._format = action_format
        self._rag = rag
        stores = (self._store, references or AnswerStore())
        self._answers = RagAnswers(rag, score_threshold, top_k, action_format, *stores)

    @property
    def names(self) -> RewardNames:
        of_judge = super().names
        return replace(
            of_judge,
            columns=frozenset({"row", METER}),
            needs=(),
            at_once=min(slots_of(self._rag.transports), of_judge.at_once),
            components=tuple(dict.fromkeys((*COMPONENTS, *self._scoring.judged_names))),
            places={**dict.fromkeys(self._rag.transports, f"at {self._rag.identity}"), **of_judge.places},
            # the run can do without the 32B endpoint
            required=(tuple(self._rag.transports)[:1], *of_judge.required),
        )

    async def prepare(self, rows: Iterable[Example]) -> None:
        """Request these rows' 32B answers. After an error the next completion retries and reports it."""
        wanted = [self._rows[index] for index in dict.fromkeys(int(row["row"]) for row in rows)]
        with deadline(self.deadline_s), noted_in(self._ahead_record if self.records else None):
            fetched = [self._answers.reference(row, ahead=True) for row in wanted if self._scoring.rubrics(row.branch)]
            await asyncio.gather(*fetched, return_exceptions=True)

    async def drain(self) -> BatchReport:
        answers, references = self._answers.answer_cache, self._answers.reference_cache
        of_judge = await super().drain()
        hits = {"answers": answers.hits + of_judge.cache_hits["answers"], "references": references.hits}
        answers.hits = references.hits = 0
        return replace(of_judge, cache_hits=hits)

    async def _first_questions(self, row: SalesRow, action: Action) -> dict[str, float | ServiceError]:
        row, answers = self._rows[0], self._answers
        action = answers.plain_action(row.conversation[-1].content)
        asked = (answers.ask_8b(row, action), answers.ask_32b(row))
        results = dict(zip(self._rag.transports, await asyncio.gather(*map(seconds_or_error, asked)), strict=True))
        if any(self._scoring.rubrics(branch) for branch in self._scoring.weights):
            results |= await super()._first_questions(row, action)
        return results

    async def aclose(self) -> None:
        await self._answers.aclose()
        await super().aclose()

    def _transports(self) -> dict[str, Transport]:
        return {**self._rag.transports, **super()._transports()}

    async def _case(self, sample: Sample, stages: StageTimes) -> Known:
        began = time.perf_counter()
        action = parse_action(sample.text, self._format)
        stages.record(Stage.PARSE, began)
        if isinstance(action, InvalidAction):
            return action
        row, record = self._rows[int(sample.row["row"])], stages.completion_record
        if record is not None:
            record.action = action.as_dict()
        reference_asked = asyncio.ensure_future(self._reference_or_none(row, stages))
        try:
            answer = await stages.timed(self._answers.candidate(row, action), Stage.RAG_8B)
            self.lines.answer(row.row_id, Stage.RAG_8B, stages.seconds[Stage.RAG_8B], answer)
            if record is not None:
                record.answer = kept(answer)
            # reject a hollow answer, unless the index is at fault
            if not answer.passages and not await self._answers.index_has_some(row):
                return Missing(reason="no_passages")
            if is_empty_text(answer.text):
                return InvalidAction(reason="hollow_answer")
            return Case(row=row, action=action, answer=answer, reference=await reference_asked)
        finally:
            reference_asked.cancel()  # no longer needed, so its error is not reported

    async def _reference_or_none(self, row: SalesRow, stages: StageTimes) -> Answer | None:
        """The reference answer, within half the remaining time. Without it the judge scores the candidate alone."""
        if not self._scoring.rubrics(row.branch):
            return None
        with deadline(remaining_s() / 2):
            try:
                async with asyncio.timeout(remaining_s()):  # a shared call may last longer
                    answer = await stages.timed(self._answers.reference(row), Stage.RAG_32B)
            except (ServiceError, TimeoutError) as error:
                reason = error.code if isinstance(error, ServiceError) else "deadline"
                self.lines.no_answer(row.row_id, Stage.RAG_32B, reason)
                return None
        self.lines.answer(row.row_id, Stage.RAG_32B, stages.seconds[Stage.RAG_32B], answer)
        if stages.completion_record is not None:
            stages.completion_record.reference = kept(answer)
        return answer
