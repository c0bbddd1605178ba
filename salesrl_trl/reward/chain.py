"""The reward of a batch: parse -> RAG 8B and 32B -> judge -> score, all completions at once.

Owns the order of the stages, the deadline of a reward phase and what every failure means. How a single call is made
is the transport's; what a verdict is worth is `scoring`'s.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from salesrl_trl.errors import JudgeInvalid, ServiceError
from salesrl_trl.reward.judge import JudgeClient
from salesrl_trl.reward.parsing import parse_action
from salesrl_trl.reward.rag import RagClient
from salesrl_trl.reward.scoring import missing, score, score_invalid
from salesrl_trl.types import Answer, InvalidAction, Outcome, Reward, SalesRow

T = TypeVar("T")


class SalesReward:
    """The async reward function handed to TRL.

    One value per completion; `None` where a service or the judge failed, which TRL keeps out of the group's baseline
    and gives the advantage 0. `last` holds the full `Reward` of every completion of the latest batch.

    Args:
        rows (`Sequence[SalesRow]`):
            All rows, addressed by the dataset's `row` column.
        rag (`RagClient`):
            Both RAG endpoints.
        judge (`JudgeClient`):
            The judge.
        deadline_s (`float`):
            Seconds a batch may take. What is not scored by then is cancelled and missing, reason `"deadline"`.
        invalid_action_reward (`float`):
            Reward of a completion that is no action.
    """

    __name__ = "sales"  # TRL names the reward's metrics after it

    def __init__(
        self,
        rows: Sequence[SalesRow],
        rag: RagClient,
        judge: JudgeClient,
        *,
        deadline_s: float,
        invalid_action_reward: float,
    ) -> None:
        self._rows = rows
        self._rag = rag
        self._judge = judge
        self._deadline_s = deadline_s
        self._invalid_action_reward = invalid_action_reward
        self._references: dict[int, asyncio.Task[Answer]] = {}
        self.last: list[Reward] = []
        self.last_seconds = 0.0

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
        chains = [
            asyncio.create_task(self._score(index, _text(completion)))
            for index, completion in zip(row, completions, strict=True)
        ]
        self.last = await self._collect(chains)
        self.last_seconds = time.perf_counter() - started
        return [reward.value for reward in self.last]

    def branch_of(self, index: int) -> str:
        """The branch of the row at `index`."""
        return self._rows[index].branch

    async def aclose(self) -> None:
        """Cancel what is still in flight and close the connections."""
        references = list(self._references.values())
        for task in references:
            task.cancel()
        await asyncio.gather(*references, return_exceptions=True)
        await self._rag.aclose()
        await self._judge.aclose()

    async def _collect(self, chains: list[asyncio.Task[Reward]]) -> list[Reward]:
        """Every chain's reward; those that outlast the deadline are cancelled and missing."""
        try:
            _, late = await asyncio.wait(chains, timeout=self._deadline_s)
        except asyncio.CancelledError:
            for chain in chains:
                chain.cancel()
            raise
        for chain in late:
            chain.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        out_of_time = missing(Outcome.INFRA, "deadline", {})
        return [out_of_time if chain.cancelled() else chain.result() for chain in chains]

    async def _score(self, index: int, completion: str) -> Reward:
        action = parse_action(completion)
        if isinstance(action, InvalidAction):
            return score_invalid(action, self._invalid_action_reward)
        row = self._rows[index]
        seconds: dict[str, float] = {}
        reference_asked = asyncio.ensure_future(_or_none(_timed(self._reference(index), "rag_32b", seconds)))
        try:
            candidate = await _timed(self._rag.chat_8b(row, action), "rag_8b", seconds)
            reference = await reference_asked
            verdict = await _timed(self._judge.judge(row, action, candidate, reference), "judge", seconds)
        except JudgeInvalid as error:
            return missing(Outcome.JUDGE_INVALID, error.code, seconds)
        except ServiceError as error:
            return missing(Outcome.INFRA, error.code, seconds)
        finally:
            reference_asked.cancel()
        return score(verdict, seconds)

    async def _reference(self, index: int) -> Answer:
        """The row's 32B answer, asked for once: it does not depend on the policy. A failure is not kept."""
        task = self._references.get(index)
        if task is None:
            task = self._references[index] = asyncio.ensure_future(self._rag.chat_32b(self._rows[index]))
            task.add_done_callback(lambda done: self._forget_failed(index, done))
        # Shielded: the completions of a group share the task, and one that is cut off must not cancel it.
        return await asyncio.shield(task)

    def _forget_failed(self, index: int, task: asyncio.Task[Answer]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._references.pop(index, None)


async def _or_none(reference: Awaitable[Answer]) -> Answer | None:
    """The reference answer, or `None`: without it the judge scores the candidate alone."""
    try:
        return await reference
    except ServiceError:
        return None


async def _timed(call: Awaitable[T], stage: str, seconds: dict[str, float]) -> T:
    started = time.perf_counter()
    try:
        return await call
    finally:
        seconds[stage] = time.perf_counter() - started


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[0]["content"])
