"""The reward: parse -> RAG 8B and 32B -> judge -> score, all completions at once.

Owns the order of the stages and what every failure means. How the completions of a batch are started, awaited and
given up is `batch`'s; how a single call is made is the transport's; what a verdict is worth is `scoring`'s; what is
asked once only is the cache's.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from salesrl_trl.errors import JudgeInvalid, ServiceError
from salesrl_trl.names import Stage
from salesrl_trl.reward.batch import BatchedReward, BatchReport
from salesrl_trl.reward.cache import AnswerStore, Memo, cache_key
from salesrl_trl.reward.empty_answers import is_hollow
from salesrl_trl.reward.judge.client import JudgeClient
from salesrl_trl.reward.judge.verdict import verdict_from_json, verdict_to_json
from salesrl_trl.reward.parsing import MAX_FIELD_CHARS, parse_action
from salesrl_trl.reward.rag.checks import (
    check_8b,
    check_32b,
    check_kept_8b,
    check_kept_32b,
    check_passages,
    check_verdict,
)
from salesrl_trl.reward.rag.client import RagBackend, answer_from_json, answer_to_json
from salesrl_trl.reward.rag.kept import check_kept
from salesrl_trl.reward.scoring import Scoring, missing
from salesrl_trl.reward.service.deadline import deadline, remaining_s
from salesrl_trl.reward.service.transport import Transport
from salesrl_trl.reward.stages import Stages
from salesrl_trl.types import (
    DEFAULT_FORMAT,
    Action,
    ActionFormat,
    Answer,
    InvalidAction,
    Outcome,
    Reward,
    SalesRow,
    Verdict,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)


class SalesReward(BatchedReward):
    """The async reward function handed to TRL: both RAG endpoints, the judge, a score.

    Args:
        rows (`Sequence[SalesRow]`):
            All rows, addressed by the dataset's `row` column.
        rag (`RagBackend`):
            Both RAG endpoints.
        judge (`JudgeClient`):
            The judge.
        scoring (`Scoring`):
            The law of the reward.
        score_threshold (`float`):
            Passages below this normalised score in [0, 1] are left out.
        top_k (`int`):
            Most passages to retrieve.
        deadline_s (`float`):
            Seconds a completion may take from its start. What is not scored by then is cancelled and missing, reason
            `"deadline"`.
        answers (`AnswerStore`, *optional*):
            Keeps 8B answers and verdicts. In memory when not given.
        references (`AnswerStore`, *optional*):
            Keeps 32B answers, which do not depend on the policy. In memory when not given.
        action_format (`ActionFormat`, *optional*):
            What an action consists of.
        announces (`bool`, *optional*, defaults to `True`):
            Whether this is the process that says what became of kept references.
    """

    __name__ = "sales"  # TRL names the reward's metrics after it

    def __init__(
        self,
        rows: Sequence[SalesRow],
        rag: RagBackend,
        judge: JudgeClient,
        scoring: Scoring,
        *,
        score_threshold: float,
        top_k: int,
        deadline_s: float,
        answers: AnswerStore | None = None,
        references: AnswerStore | None = None,
        action_format: ActionFormat = DEFAULT_FORMAT,
        announces: bool = True,
    ) -> None:
        super().__init__(deadline_s)
        self._rows = rows
        self._format = action_format
        self._announces = announces
        self._rag = rag
        self._judge = judge
        self._scoring = scoring
        self._retrieval = (score_threshold, top_k)
        self._stores = (answers or AnswerStore(), references or AnswerStore())
        self._answers = Memo(self._stores[0], answer_to_json, answer_from_json)
        self._verdicts = Memo(self._stores[0], verdict_to_json, verdict_from_json)
        self._references = Memo(self._stores[1], answer_to_json, answer_from_json)
        self._ahead: set[asyncio.Task[None]] = set()

    @property
    def provider_names(self) -> tuple[str, ...]:
        """Judge providers, in fallback order."""
        return self._judge.provider_names

    @property
    def component_names(self) -> tuple[str, ...]:
        """Everything a reward may be made of, in a fixed order."""
        return self._scoring.component_names

    @property
    def service_names(self) -> tuple[str, ...]:
        """Everything that has traffic of its own, in a fixed order."""
        return tuple(self._transports())

    @property
    def places(self) -> dict[str, str]:
        """Where each service is, and for which model it is asked, for messages."""
        return {**dict.fromkeys(self._rag.transports, f"at {self._rag.identity}"), **self._judge.places}

    def fetch_references(self, rows: Iterable[int]) -> None:
        """Ask for the 32B answers of these rows ahead of their completions, each once. Completions that come while one
        is under way share what becomes of it, as those of a group do; after a failure the next one asks again."""
        if self._stopped is not None:
            return
        for index in dict.fromkeys(rows):
            row = self._rows[index]
            if self._scoring.rubrics(row.branch):
                with deadline(self.deadline_s):
                    task = asyncio.ensure_future(self._fetch_reference(row))
                self._ahead.add(task)
                task.add_done_callback(self._ahead.discard)

    async def _fetch_reference(self, row: SalesRow) -> None:
        with contextlib.suppress(Exception):  # who needs it meets the same, or asks again, and tells
            await self._references.fetch(self._reference_key(row), lambda: self._chat_32b(row), check_kept_32b)

    def branch_of(self, index: int) -> str:
        """The branch of the row at `index`."""
        return self._rows[index].branch

    def take_report(self) -> BatchReport:
        """The times of the batch that was last waited for, and all traffic since the last report.

        Every provider and service is in it, also those that were not asked. Where several batches are in flight, a
        call is counted in the report that comes after it, whichever batch it was for.
        """
        report = replace(
            self._taken().report(),
            usage=self._judge.take_usage(),
            traffic={
                name: {**transport.take_traffic(), "slots": transport.slots}
                for name, transport in self._transports().items()
            },
            records=self._judge.take_records(),
            cache_hits={"answers": self._answers.hits + self._verdicts.hits, "references": self._references.hits},
        )
        self._answers.hits = self._verdicts.hits = self._references.hits = 0
        return report

    async def warm_up(self) -> dict[str, float | ServiceError]:
        """Ask both endpoints and every judge provider once, before anything depends on them, and the 32B endpoint for
        some of the references that are kept.

        Returns:
            `dict[str, float | ServiceError]`: by service, the seconds its answer took, or what went wrong and where.
        """
        with deadline(self.deadline_s):
            return await self._warm_up()

    async def _warm_up(self) -> dict[str, float | ServiceError]:
        row = self._rows[0]
        action = self._plain_action(row.conversation[-1].content)
        answers = await asyncio.gather(
            _clocked(functools.partial(self._chat_8b, row, action)), _clocked(functools.partial(self._chat_32b, row))
        )
        told: dict[str, float | ServiceError] = {
            name: result if isinstance(result, ServiceError) else result[1]
            for name, result in zip(self._rag.transports, answers, strict=True)
        }
        judged = next((result[0] for result in answers if not isinstance(result, ServiceError)), _NO_ANSWER)
        if self._needs_judge:
            told.update(await self._judge.warm_up(row, action, judged))
        if not isinstance(answers[0], ServiceError) and not answers[0][0].passages:
            await self._warn_of_an_empty_index(row)
        if not isinstance(answers[1], ServiceError):
            await self._check_kept_references()
        self.take_report()
        for name, result in told.items():
            if isinstance(result, ServiceError):
                result.args = (f"{result} ({name}: {self.places[name]})",)
        return told

    async def _warn_of_an_empty_index(self, row: SalesRow) -> None:
        found = await _clocked(functools.partial(self._index_has_some, row))
        if not isinstance(found, ServiceError) and not found[0] and self._announces:
            logger.warning(
                f"[RAG] {self._rag.identity} finds nothing for the first row, not even without a threshold: look "
                "whether its index is loaded, and whether it knows the rows' tenant_id. Such rows are not scored "
                "(`no_passages`)."
            )

    async def _check_kept_references(self) -> None:
        judged = (row for row in self._rows if self._scoring.rubrics(row.branch))
        rows = {self._reference_key(row): row for row in judged}
        said = await check_kept(self._stores[1], self._stores[0], self._rag.identity, rows, self._chat_32b)
        for text, is_warning in said if self._announces else ():
            logger.log(logging.WARNING if is_warning else logging.INFO, f"[References] {text}")

    def unusable(self, warm_up: Mapping[str, float | ServiceError]) -> list[ServiceError]:
        """The errors of a `warm_up` after which nothing could be scored: the 8B endpoint's, or all judges'. A run can
        go on without the 32B endpoint."""
        needed = [warm_up[name] for name in list(self._rag.transports)[:1]]
        judges = [warm_up[name] for name in self._judge.transports if name in warm_up]
        if judges and all(isinstance(result, ServiceError) for result in judges):
            needed += judges
        return [result for result in needed if isinstance(result, ServiceError)]

    async def aclose(self) -> None:
        """Cancel what is still in flight, close the connections and the caches."""
        for batch in self._open:
            batch.cancel()
        for task in self._ahead:
            task.cancel()
        for memo in (self._answers, self._verdicts, self._references):
            await memo.aclose()
        await self._rag.aclose()
        await self._judge.aclose()
        for store in self._stores:
            await asyncio.to_thread(store.close)

    @property
    def _needs_judge(self) -> bool:
        return any(self._scoring.rubrics(branch) for branch in self._scoring.weights)

    def _transports(self) -> dict[str, Transport]:
        return {**self._rag.transports, **self._judge.transports}

    def _settled(self) -> None:
        for store in self._stores:
            store.flush()

    async def score(self, index: int, completion: str, stages: Stages) -> Reward:
        began = time.perf_counter()
        action = parse_action(completion, self._format)
        stages.record(Stage.PARSE, began)
        if isinstance(action, InvalidAction):
            return self._scoring.score_invalid(action, stages.seconds)
        row = self._rows[index]
        reference_asked = asyncio.ensure_future(self._reference_or_none(row, stages))
        try:
            candidate = await stages.timed(self._candidate(row, action), Stage.RAG_8B)
            if not candidate.passages and not await self._index_has_some(row):
                return missing(Outcome.INFRA, "no_passages", stages.seconds)
            if is_hollow(candidate.text):
                return self._scoring.score_invalid(InvalidAction(reason="hollow_answer"), stages.seconds)
            return await self._judged(row, action, candidate, await reference_asked, stages)
        except ServiceError as error:
            return missing(Outcome.INFRA, error.code, stages.seconds)
        finally:
            reference_asked.cancel()  # and what it raised, if it did, is not told of

    async def _reference_or_none(self, row: SalesRow, stages: Stages) -> Answer | None:
        """The reference answer, or `None`: without it the judge scores the candidate alone. It has half of the time
        that is left, so that a judge still has some."""
        if not self._scoring.rubrics(row.branch):
            return None
        with deadline(remaining_s() / 2):
            try:
                async with asyncio.timeout(remaining_s()):  # what another one asked for may go on for longer
                    return await stages.timed(self._reference(row), Stage.RAG_32B)
            except (ServiceError, TimeoutError):
                return None

    async def _judged(
        self, row: SalesRow, action: Action, candidate: Answer, reference: Answer | None, stages: Stages
    ) -> Reward:
        """Every judgement the branch weighs, at once."""
        seconds = stages.seconds
        wanted = self._scoring.rubrics(row.branch)
        material = (row, action, candidate, reference)
        asked = (_or_error(functools.partial(self._verdict, rubric, *material)) for rubric in wanted.values())
        results = await stages.timed(asyncio.gather(*asked), Stage.JUDGE)
        verdicts = {
            name: None if isinstance(result, ServiceError) else result
            for name, result in zip(wanted, results, strict=True)
        }
        failed = next((result for result in results if isinstance(result, ServiceError)), None)
        if failed is None:
            failure = (Outcome.INFRA, "no_reference")
            return self._scoring.score(row.branch, candidate, reference, verdicts, seconds, failure)
        outcome = Outcome.JUDGE_INVALID if isinstance(failed, JudgeInvalid) else Outcome.INFRA
        return self._scoring.score(row.branch, candidate, reference, verdicts, seconds, (outcome, failed.code))

    async def _candidate(self, row: SalesRow, action: Action) -> Answer:
        """The 8B answer to an action."""
        key = cache_key("8b", self._rag.identity, self._asked(row), action.as_dict(), action.query_field)
        return await self._answers.get(key, lambda: self._chat_8b(row, action), check_kept_8b)

    async def _index_has_some(self, row: SalesRow) -> bool:
        """Whether the 8B endpoint finds any passage with the conversation itself and without a threshold. If not, it
        is no fault of an action that it found none. A yes is asked for once."""
        query = self._plain_action(row.context)
        key = cache_key("any passage", self._rag.identity, self._asked(row))

        async def ask() -> Answer:
            return await self._rag.chat_8b(row.context, query, 0.0, self._retrieval[1], ids=row.ids)

        return bool((await self._answers.get(key, ask, check_passages)).passages)

    def _plain_action(self, query: str) -> Action:
        query = query[-MAX_FIELD_CHARS:]  # no action has a longer one, and services may refuse it
        fields = dict.fromkeys(self._format.fields, "") | {self._format.query: query}
        return Action(fields=fields, query_field=self._format.query)

    async def _reference(self, row: SalesRow) -> Answer:
        """The row's 32B answer, asked for once: it does not depend on the policy."""
        return await self._references.get(self._reference_key(row), lambda: self._chat_32b(row), check_kept_32b)

    def _reference_key(self, row: SalesRow) -> str:
        return cache_key("32b", self._rag.identity, self._asked(row))

    async def _verdict(
        self, rubric: str, row: SalesRow, action: Action, candidate: Answer, reference: Answer | None
    ) -> Verdict:
        texts = (candidate.text, None if reference is None else reference.text)
        material = (row.branch, row.context, row.documents, action.as_dict(), texts)
        key = cache_key(self._judge.identity(rubric), material)
        return await self._verdicts.get(
            key,
            lambda: self._judge.judge(rubric, row, action, candidate, reference),
            functools.partial(check_verdict, reference is not None),
        )

    def _asked(self, row: SalesRow) -> tuple[Any, ...]:
        """What both endpoints are asked with, for the cache's keys."""
        return (row.context, row.ids.as_dict(), self._retrieval)

    async def _chat_8b(self, row: SalesRow, action: Action) -> Answer:
        answer = await self._rag.chat_8b(row.context, action, *self._retrieval, ids=row.ids)
        check_8b(answer)
        return answer

    async def _chat_32b(self, row: SalesRow) -> Answer:
        answer = await self._rag.chat(row.context, *self._retrieval, ids=row.ids)
        check_32b(answer)
        return answer


_NO_ANSWER = Answer(text="No answer.", passages=(), took_ms=0.0)


async def _clocked(call: Callable[[], Awaitable[T]]) -> tuple[T, float] | ServiceError:
    """The answer and its seconds, or what went wrong; an error in a backend's code too, since other ranks wait."""
    started = time.perf_counter()
    try:
        answer = await call()
    except ServiceError as error:
        return error
    except Exception as error:
        return ServiceError(f"the backend raised {type(error).__name__}", f"raised_{type(error).__name__}")
    return answer, time.perf_counter() - started


async def _or_error(call: Callable[[], Awaitable[T]]) -> T | ServiceError:
    """Calls only when it runs: cancelled before that, it leaves nothing that was never awaited."""
    try:
        return await call()
    except ServiceError as error:
        return error
