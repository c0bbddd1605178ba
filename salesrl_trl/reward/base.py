"""A reward that scores each completion by itself, and gathers a batch for TRL.

    class Brevity(BatchedReward):
        async def score(self, index, completion, stages):
            return Reward(outcome=Outcome.OK, value=1 / (1 + len(completion)))

        def branch_of(self, index):
            return "fairness"

Owns what a trainer needs of any reward, with defaults for one that asks no service, and the rule for an error in a
reward's code.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from salesrl_trl.errors import ServiceError
from salesrl_trl.reward.batch import BatchReport, BatchResult, Completion, RewardBatch
from salesrl_trl.reward.open_batches import OpenBatches
from salesrl_trl.reward.sample_lines import SampleLines
from salesrl_trl.reward.scoring import missing
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.timing import Span
from salesrl_trl.types import Outcome, Reward

logger = logging.getLogger(__name__)

DEADLINE_S = 300.0
"""Seconds that a completion may take by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardNames:
    """The names behind a reward's figures and messages. They are the same in every process, and never change."""

    providers: tuple[str, ...] = ()
    """Judge providers, in fallback order."""
    components: tuple[str, ...] = ()
    """The components that a reward may have."""
    stages: tuple[str, ...] = ()
    """The user's stages, in their order."""
    services: tuple[str, ...] = ()
    """The services with traffic of their own."""
    places: Mapping[str, str] = field(default_factory=dict)
    """The address of each service, with its model."""


class BatchedReward(ABC):
    """An async reward function for TRL that scores each completion by itself, from the moment it is started.

    One value per completion; `None` where a service or the judge failed, which TRL keeps out of the group's baseline
    and gives the advantage 0.

    A subclass has to write `score` and `branch_of`. Everything else has a default.

    Args:
        deadline_s (`float`, *optional*, defaults to `300.0`):
            Seconds a completion may take from its start. What is not scored by then is cancelled and missing, reason
            `"deadline"`.
    """

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.deadline_s = deadline_s
        self.batches = OpenBatches(self._batch, self.under_way)
        """Batches without a result."""
        self.lines = SampleLines()
        """Logs what happens to single completions."""
        self._logged_faults: set[tuple[str, str]] = set()

    @abstractmethod
    async def score(self, index: int, completion: str, stages: StageTimes) -> Reward:
        """The reward of one completion.

        Args:
            index (`int`):
                Index of its row.
            completion (`str`):
                The policy's text.
            stages (`StageTimes`):
                Times the calls that are awaited: `await stages.timed(call, "judge")`.
        """

    @abstractmethod
    def branch_of(self, index: int) -> str:
        """The branch of the row at `index`."""

    def row_id(self, index: int) -> str:
        """The name of the row at `index`, for log lines."""
        return f"row {index}"

    @property
    def names(self) -> RewardNames:
        """The names behind figures and messages."""
        return RewardNames()

    def fetch_references(self, rows: Iterable[int]) -> None:  # noqa: B027  for those that have references
        """Ask for answers that do not depend on the policy, before these rows' completions come. Does not wait."""

    async def warm_up(self) -> dict[str, float | ServiceError]:
        """Ask every service once. Returns by service the seconds of its answer, or its error, which names
        the place."""
        return {}

    def unusable(self, warm_up: Mapping[str, float | ServiceError]) -> list[ServiceError]:
        """The errors of a `warm_up` after which nothing could be scored."""
        return []

    async def drained(self, report: BatchReport) -> BatchReport:
        """The report of a batch, with everything that services did since the last one."""
        return report

    def under_way(self, batch: RewardBatch) -> list[str]:
        """The stages of a batch that are under way, one entry for each completion and stage. From any thread."""
        return batch.under_way()

    def unreported_spans(self) -> list[Span]:
        """The stages of batches without a result, for example of one that was cut off. From any thread."""
        return self.batches.spans()

    async def aclose(self) -> None:
        """Cancel what is in flight, and close what belongs to the running event loop."""
        for batch in self.batches:
            batch.cancel()

    async def __call__(
        self, *, prompts: list[object], completions: list[Completion], row: list[int], **_: object
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
        return (await self.score_all(row, completions)).values

    async def score_all(self, rows: Sequence[int], completions: Sequence[Completion]) -> BatchResult:
        """Score a batch of completions to these rows."""
        return await self.result(self.batches.begin(rows), completions)

    async def result(self, batch: RewardBatch, completions: Sequence[Completion]) -> BatchResult:
        """Wait for all rewards of a batch, and report on it.

        Starts completions that were not started with the very same text. A waiter that is cancelled cancels the batch.

        Args:
            batch (`RewardBatch`):
                From `batches.begin`.
            completions (`Sequence`):
                One for each place, as in `__call__`.
        """
        batch.start_all(completions)
        await batch.settled([range(len(batch))])
        report = await self.drained(batch.report())
        self.batches.close(batch)
        return BatchResult(rewards=tuple(reward for reward in batch.rewards if reward is not None), report=report)

    def conclude(self, scoring: "asyncio.Task[Reward]") -> Reward:
        """The reward of a `score` that returned, raised or was cancelled.

        An error is a fault in code. It is logged once by its place, without its message, which may hold a customer's
        text. The completion is missing, and the run goes on.
        """
        if scoring.cancelled():
            return missing(Outcome.INFRA, "cancelled", {})
        error = scoring.exception()
        if error is None:
            return scoring.result()
        name = type(error).__name__
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "an unknown place"
        if (name, place) not in self._logged_faults:
            self._logged_faults.add((name, place))
            logger.error(f"the reward raised {name} at {place}; completions it happens to are missing")
        return missing(Outcome.INFRA, f"raised_{name}", {})

    def _batch(self, rows: Sequence[int], lane: int) -> RewardBatch:
        def record(index: int, completion: str | None, reward: Reward) -> None:
            self.lines.scored(self.row_id(index), completion, reward)

        return RewardBatch(rows, self.score, self.conclude, self.deadline_s, lane, record)
