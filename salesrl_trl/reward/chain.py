"""The reward of a batch: parse -> RAG 8B and 32B -> judge -> score, all completions at once.

Owns the order of the stages, the deadline of a reward phase and what every failure means. How a single call is made
is the transport's; what a verdict is worth is `scoring`'s; what is asked once only is the cache's.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from salesrl_trl.errors import BadServiceResponse, JudgeInvalid, ServiceError
from salesrl_trl.reward.cache import AnswerStore, Memo, cache_key
from salesrl_trl.reward.deadline import deadline
from salesrl_trl.reward.hollow import is_hollow
from salesrl_trl.reward.judge import JudgeClient, JudgeRecord
from salesrl_trl.reward.parsing import parse_action
from salesrl_trl.reward.provider import ProviderUsage
from salesrl_trl.reward.rag import RagBackend, answer_from_json, answer_to_json
from salesrl_trl.reward.scoring import Scoring, missing
from salesrl_trl.reward.transport import Transport
from salesrl_trl.reward.verdict import verdict_from_json, verdict_to_json
from salesrl_trl.timing import Span
from salesrl_trl.types import Action, Answer, InvalidAction, Outcome, Reward, SalesRow, Verdict

T = TypeVar("T")

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 1.0
"""What a cancelled call is given to end. One that does not is left behind: the step goes on."""


@dataclass(slots=True)
class _Extent:
    """From the first start to the last end of something that many do at once."""

    first: float | None = None
    last: float = 0.0

    @property
    def seconds(self) -> float:
        return 0.0 if self.first is None else self.last - self.first

    def extend(self, started: float) -> None:
        """Something that began at `started` is over now."""
        self.first = started if self.first is None else min(self.first, started)
        self.last = time.perf_counter()


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReport:
    """What happened beside the rewards while a batch was scored."""

    seconds: float
    """From the first call to the last answer."""
    judge_seconds: float
    """From the first verdict asked for to the last that came."""
    usage: Mapping[str, ProviderUsage]
    """By judge provider."""
    traffic: Mapping[str, Mapping[str, int]]
    """By service, then by the names of `transport.TRAFFIC` and `"slots"`."""
    records: Sequence[JudgeRecord]
    """Every verdict."""
    cache_hits: Mapping[str, int]
    """Calls saved, for `"answers"` and `"references"`."""
    started: float = 0.0
    """When the batch began, on `time.perf_counter`'s scale."""
    spans: Sequence[Span] = ()
    """Every stage of every completion, on a track of its place in the batch; references on one beside it."""


class _Stages:
    """What the stages of one completion took, and which is under way.

    Args:
        place (`int`):
            The completion's, in the batch.
    """

    def __init__(self, place: int) -> None:
        self.seconds: dict[str, float] = {}
        self.spans: list[Span] = []
        self._track = f"reward {place}"
        self._open: dict[str, float] = {}

    @property
    def under_way(self) -> list[str]:
        """Stages that are not over. From any thread."""
        return list(self._open)

    async def timed(self, call: Awaitable[T], stage: str) -> T:
        """Await `call` as a stage."""
        failed, started = True, time.perf_counter()
        self._open[stage] = started
        try:
            result = await call
            failed = False
            return result
        finally:
            del self._open[stage]
            self.record(stage, started, failed)

    def record(self, stage: str, started: float, failed: bool = False) -> None:
        """A stage that began at `started` is over now."""
        span = self._span(stage, started, failed)
        self.seconds[stage] = span.seconds
        self.spans.append(span)

    def so_far(self) -> list[Span]:
        """What is over, and as failed what is not. From any thread."""
        return [*self.spans, *(self._span(stage, started, True) for stage, started in list(self._open.items()))]

    def _span(self, stage: str, started: float, failed: bool) -> Span:
        track = f"{self._track} reference" if stage == "rag_32b" else self._track
        return Span(name=stage, started=started, ended=time.perf_counter(), track=track, failed=failed)


class SalesReward:
    """The async reward function handed to TRL.

    One value per completion; `None` where a service or the judge failed, which TRL keeps out of the group's baseline
    and gives the advantage 0. `last` holds the full `Reward` of every completion of the latest batch.

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
            Seconds a batch may take. What is not scored by then is cancelled and missing, reason `"deadline"`.
        answers (`AnswerStore`, *optional*):
            Keeps 8B answers and verdicts. In memory when not given.
        references (`AnswerStore`, *optional*):
            Keeps 32B answers, which do not depend on the policy. In memory when not given.
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
    ) -> None:
        self._rows = rows
        self._rag = rag
        self._judge = judge
        self._scoring = scoring
        self._retrieval = (score_threshold, top_k)
        self._deadline_s = deadline_s
        self._stores = (answers or AnswerStore(), references or AnswerStore())
        self._answers = Memo(self._stores[0], answer_to_json, answer_from_json)
        self._verdicts = Memo(self._stores[0], verdict_to_json, verdict_from_json)
        self._references = Memo(self._stores[1], answer_to_json, answer_from_json)
        self._judging = _Extent()
        self._told: set[str] = set()
        self.last: list[Reward] = []
        self._extent = _Extent()
        self._stages: list[_Stages] = []

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

    async def __call__(
        self, *, prompts: list[Any], completions: list[Any], row: list[int], **_: Any
    ) -> list[float | None]:
        """Score a batch.

        Args:
            prompts (`list`):
                Not used: the row says more.
            completions (`list`):
                Texts, or TRL's conversational form `[{"role": "assistant", "content": text}]`.
            row (`list[int]`):
                Index of each completion's row.

        Returns:
            `list[float | None]`: in the order of `completions`.
        """
        started = time.perf_counter()
        judging = self._judging = _Extent()
        self._stages = [_Stages(place) for place in range(len(completions))]
        with deadline(self._deadline_s):
            chains = [
                asyncio.create_task(self._score(index, _text(completion), stages, judging))
                for index, completion, stages in zip(row, completions, self._stages, strict=True)
            ]
        self.last = await self._collect(chains, [stages.seconds for stages in self._stages])
        for store in self._stores:
            store.flush()
        self._extent = _Extent()
        self._extent.extend(started)
        return [reward.value for reward in self.last]

    def status(self) -> str:
        """How many completions are in which stage at the moment, for a person who waits. From any thread."""
        batch = self._stages
        if not batch:
            return "none is being scored"
        under_way = Counter(stage for stages in batch for stage in stages.under_way)
        told = ", ".join(f"{count} in {name}" for name, count in under_way.items())
        return f"of {len(batch)} completions {told}" if told else "this rank's are scored, another's may be out"

    def unreported_spans(self) -> list[Span]:
        """The stages of a batch of which no report was taken, for example since it was cut off. From any thread."""
        return [span for stages in self._stages for span in stages.so_far()]

    def branch_of(self, index: int) -> str:
        """The branch of the row at `index`."""
        return self._rows[index].branch

    def take_report(self) -> BatchReport:
        """What happened since the last time. Every provider and service is in it, also those that were not asked."""
        report = BatchReport(
            seconds=self._extent.seconds,
            judge_seconds=self._judging.seconds,
            usage=self._judge.take_usage(),
            traffic={
                name: {**transport.take_traffic(), "slots": transport.slots}
                for name, transport in self._transports().items()
            },
            records=self._judge.take_records(),
            cache_hits={"answers": self._answers.hits + self._verdicts.hits, "references": self._references.hits},
            started=self._extent.first or 0.0,
            spans=[span for stages in self._stages for span in stages.spans],
        )
        self._answers.hits = self._verdicts.hits = self._references.hits = 0
        self._stages = []
        return report

    async def warm_up(self) -> dict[str, float | ServiceError]:
        """Ask both endpoints and every judge provider once, before anything depends on them.

        Returns:
            `dict[str, float | ServiceError]`: by service, the seconds its answer took, or what went wrong.
        """
        with deadline(self._deadline_s):
            return await self._warm_up()

    async def _warm_up(self) -> dict[str, float | ServiceError]:
        row = self._rows[0]
        action = Action(user_profile="", rewritten_query=row.conversation[-1].content, history_summary="")
        answers = await asyncio.gather(_clocked(self._chat_8b(row, action)), _clocked(self._chat_32b(row)))
        told: dict[str, float | ServiceError] = {
            name: result if isinstance(result, ServiceError) else result[1]
            for name, result in zip(self._rag.transports, answers, strict=True)
        }
        judged = next((result[0] for result in answers if not isinstance(result, ServiceError)), _NO_ANSWER)
        if self._needs_judge:
            told.update(await self._judge.warm_up(row, action, judged))
        self.take_report()
        return told

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
        for memo in (self._answers, self._verdicts, self._references):
            await memo.aclose()
        await self._rag.aclose()
        await self._judge.aclose()
        for store in self._stores:
            store.close()

    @property
    def _needs_judge(self) -> bool:
        return any(self._scoring.rubrics(branch) for branch in self._scoring.weights)

    def _transports(self) -> dict[str, Transport]:
        return {**self._rag.transports, **self._judge.transports}

    async def _collect(
        self, chains: list[asyncio.Task[Reward]], seconds: Sequence[Mapping[str, float]]
    ) -> list[Reward]:
        """Every chain's reward; those that outlast the deadline are cancelled and missing."""
        try:
            _, late = await asyncio.wait(chains, timeout=self._deadline_s)
        except asyncio.CancelledError:
            for chain in chains:
                chain.cancel()
            raise
        for chain in late:
            chain.cancel()
        if late:
            await asyncio.wait(late, timeout=CANCEL_GRACE_S)
        return [
            missing(Outcome.INFRA, "deadline", stages) if chain in late else self._result(chain)
            for chain, stages in zip(chains, seconds, strict=True)
        ]

    def _result(self, chain: asyncio.Task[Reward]) -> Reward:
        """The chain's reward. An error that is none of a service's is a fault in code: told once by its place, without
        its message, which may hold a customer's text. The completion is missing, and the run goes on."""
        if chain.cancelled():
            return missing(Outcome.INFRA, "cancelled", {})
        error = chain.exception()
        if error is None:
            return chain.result()
        name = type(error).__name__
        if name not in self._told:
            self._told.add(name)
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "an unknown place"
            logger.error(f"the reward raised {name} at {place}; completions it happens to are missing")
        return missing(Outcome.INFRA, f"raised_{name}", {})

    async def _score(self, index: int, completion: str, stages: _Stages, judging: _Extent) -> Reward:
        began = time.perf_counter()
        action = parse_action(completion)
        stages.record("parse", began)
        if isinstance(action, InvalidAction):
            return self._scoring.score_invalid(action, stages.seconds)
        row = self._rows[index]
        reference_asked = asyncio.ensure_future(self._reference_or_none(row, stages))
        try:
            candidate = await stages.timed(self._candidate(row, action), "rag_8b")
            if is_hollow(candidate.text):
                return self._scoring.score_invalid(InvalidAction(reason="hollow_answer"), stages.seconds)
            reference, started = await reference_asked, time.perf_counter()
            try:
                return await self._judged(row, action, candidate, reference, stages)
            finally:
                judging.extend(started)
        except ServiceError as error:
            return missing(Outcome.INFRA, error.code, stages.seconds)
        finally:
            reference_asked.cancel()

    async def _reference_or_none(self, row: SalesRow, stages: _Stages) -> Answer | None:
        """The reference answer, or `None`: without it the judge scores the candidate alone."""
        if not self._scoring.rubrics(row.branch):
            return None
        try:
            return await stages.timed(self._reference(row), "rag_32b")
        except ServiceError:
            return None

    async def _judged(
        self, row: SalesRow, action: Action, candidate: Answer, reference: Answer | None, stages: _Stages
    ) -> Reward:
        """Every judgement the branch weighs, at once."""
        seconds = stages.seconds
        wanted = self._scoring.rubrics(row.branch)
        asked = (self._verdict(rubric, row, action, candidate, reference) for rubric in wanted.values())
        results = await stages.timed(asyncio.gather(*(_or_error(each) for each in asked)), "judge")
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
        key = cache_key("8b", self._rag.identity, self._asked(row), action.as_dict())
        return await self._answers.get(key, lambda: self._chat_8b(row, action))

    async def _reference(self, row: SalesRow) -> Answer:
        """The row's 32B answer, asked for once: it does not depend on the policy."""
        key = cache_key("32b", self._rag.identity, self._asked(row))
        return await self._references.get(key, lambda: self._chat_32b(row))

    async def _verdict(
        self, rubric: str, row: SalesRow, action: Action, candidate: Answer, reference: Answer | None
    ) -> Verdict:
        texts = (candidate.text, None if reference is None else reference.text)
        material = (row.branch, row.context, row.documents, action.as_dict(), texts)
        key = cache_key(self._judge.identity(rubric), material)
        return await self._verdicts.get(key, lambda: self._judge.judge(rubric, row, action, candidate, reference))

    def _asked(self, row: SalesRow) -> tuple[Any, ...]:
        """What both endpoints are asked with, for the cache's keys."""
        return (row.context, row.ids.as_dict(), self._retrieval)

    async def _chat_8b(self, row: SalesRow, action: Action) -> Answer:
        """One that is empty although passages were found is the service's fault, not the policy's."""
        answer = await self._rag.chat_8b(
            row.context,
            action.user_profile,
            action.rewritten_query,
            action.history_summary,
            *self._retrieval,
            ids=row.ids,
        )
        if answer.passages and not answer.text.strip():
            raise BadServiceResponse("rag_8b found passages and answered nothing", code="rag_8b_empty_answer")
        return answer

    async def _chat_32b(self, row: SalesRow) -> Answer:
        answer = await self._rag.chat(row.context, *self._retrieval, ids=row.ids)
        if is_hollow(answer.text):
            raise BadServiceResponse("rag_32b's answer says nothing", code="rag_32b_hollow_answer")
        return answer


_NO_ANSWER = Answer(text="No answer.", passages=(), took_ms=0.0)


async def _clocked(call: Awaitable[T]) -> tuple[T, float] | ServiceError:
    """The answer and its seconds, or what went wrong; an error in a backend's code too, since other ranks wait."""
    started = time.perf_counter()
    try:
        answer = await call
    except ServiceError as error:
        return error
    except Exception as error:
        return ServiceError(f"the backend raised {type(error).__name__}", f"raised_{type(error).__name__}")
    return answer, time.perf_counter() - started


async def _or_error(call: Awaitable[T]) -> T | ServiceError:
    try:
        return await call
    except ServiceError as error:
        return error


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[0]["content"])
