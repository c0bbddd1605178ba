"""What a trainer needs of any reward: completions are scored one by one, and gathered for TRL.

Owns the defaults for a reward that asks no service, and the rule for an error in a reward's code. A reward of one's
own is a function (`functions`), not a class of this kind.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from salesrl_trl.errors import ServiceError
from salesrl_trl.reward.apart import Apart
from salesrl_trl.reward.batch import BatchReport, BatchResult, Completion, RewardBatch, Sample
from salesrl_trl.reward.open_batches import OpenBatches
from salesrl_trl.reward.sample_lines import SampleLines
from salesrl_trl.reward.scoring import FORMAT, missing
from salesrl_trl.reward.service.budget import Budget
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.timing import Span
from salesrl_trl.types import Example, Outcome, Reward

logger = logging.getLogger(__name__)

DEADLINE_S = 300.0
"""Seconds that a completion may take by default."""
DRAIN_S = 3.0
"""Longest wait for the figures of services. They lie in this process."""
_TIED = (
    "SQLite objects created in a thread", "signal only works in main thread", "'_thread._local' object has no",
    "a different event loop", "a different loop", "no current event loop", "no running event loop",
)  # fmt: skip
"""In messages of errors about an object that belongs to one thread, or to one event loop."""
_OF_ONE_THREAD = (
    ". It runs in another thread than the main one, and uses what belongs to one thread or event loop: make that "
    "where it is used (docs/REWARDS.md, 'Threads')"
)
TRAINER_STATE = "trainer_state"
"""The trainer's state, beside the columns of a row."""
ORIGIN = "_origin"
"""Where a completion comes from, beside the columns of a row: an `Origin`."""
UNNAMED = "a row"


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a completion comes from, for a reward that looks it up in a record."""

    row: Example
    """The row as the dataset has it, without what an environment or the sampler adds."""
    mode: str
    """TRL's name of its purpose: `"train"` or `"eval"`."""
    step: int
    """Optimizer steps that the weights had taken which sampled it."""


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

    @property
    def has_actions(self) -> bool:
        """Whether completions are actions that may be invalid: in the packaged chain."""
        return FORMAT in self.components


class BatchedReward(ABC):
    """An async reward function for TRL that scores each completion by itself, from the moment it is started.

    One value per completion; `None` where a service or the judge failed, which TRL keeps out of the group's baseline
    and gives the advantage 0.

    A subclass has to write `score`. Everything else has a default.

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
        self.budget: Budget | None = None
        """Limits what its services may be asked. It belongs to the reward's event loop, but for its `path` and
        `limits`."""
        self.apart: Apart | None = None
        """The event loop of `score` and of all that the reward owns, where it is another one than that of batches."""
        self._logged_faults: set[str] = set()

    @abstractmethod
    async def score(self, sample: Sample, stages: StageTimes) -> Reward:
        """The reward of one completion.

        Args:
            sample (`Sample`):
                The completion, and its row as `row_of` gave it.
            stages (`StageTimes`):
                Times the calls that are awaited: `await stages.timed(call, "judge")`.
        """

    def row_of(self, example: Example) -> Any:
        """What the reward keeps of a row of the dataset. It goes along with each completion, to a process of the
        reward's own too."""
        return example

    def row_id(self, row: Any) -> str:
        """The name of a row, for log lines."""
        return f"row {row}" if isinstance(row, int) else UNNAMED

    @property
    def function_names(self) -> dict[str, str]:
        """The numbers that TRL weighs and logs by themselves: a name of each, and the one that TRL logs it under."""
        name: str = getattr(self, "__name__", type(self).__name__)
        return {name: name}

    def unit(self, group: int, size: int) -> int:
        """Number of neighbours that are scored together, in a batch of `size` completions in groups of `group`."""
        return 1

    def check_columns(self, columns: Sequence[str]) -> None:  # noqa: B027  for those that read columns
        """Raise `ConfigError` if a dataset of these columns lacks one that is read."""

    @property
    def names(self) -> RewardNames:
        """The names behind figures and messages."""
        return RewardNames()

    def fetch_references(self, rows: Iterable[Any]) -> None:  # noqa: B027  for those that have references
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
        self,
        *,
        prompts: Sequence[object],
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]] = (),
        **columns: Any,
    ) -> list[float | None]:
        """Score a batch, as TRL's own `GRPOTrainer` asks for it.

        Args:
            prompts (`Sequence`):
                Prompt of each completion. Neighbours with equal prompts are a group.
            completions (`Sequence`):
                Texts, or TRL's conversational form `[{"role": "assistant", "content": text}]`.
            completion_ids (`Sequence[Sequence[int]]`, *optional*):
                Their tokens.
            columns (`list`):
                Further columns of the dataset, a value for each completion, and TRL's own arguments.

        Returns:
            `list[float | None]`: in the order of `completions`.
        """
        log_extra, log_metric = columns.pop("log_extra", None), columns.pop("log_metric", None)
        given = {TRAINER_STATE: columns.pop(TRAINER_STATE)} if TRAINER_STATE in columns else {}
        rows = [
            self.row_of({"prompt": prompt, **given, **{name: each[place] for name, each in columns.items()}})
            for place, prompt in enumerate(prompts)
        ]
        group = next((place for place, prompt in enumerate(prompts) if prompt != prompts[0]), len(prompts))
        result = await self.score_all(rows, completions, completion_ids, group=max(group, 1))
        if log_extra and log_metric:
            result.log(log_extra, log_metric)
        return result.values

    async def score_all(
        self,
        rows: Sequence[Any],
        completions: Sequence[Completion],
        token_ids: Sequence[Sequence[int]] = (),
        group: int = 1,
    ) -> BatchResult:
        """Score a batch of completions to these rows."""
        batch = self.batches.begin(rows, group)
        batch.start_all(completions, token_ids)
        return await self.result(batch, completions)

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
        report = await self._report(batch.report())
        self.batches.close(batch)
        return BatchResult(rewards=tuple(reward for reward in batch.rewards if reward is not None), report=report)

    async def _report(self, report: BatchReport) -> BatchReport:
        if self.apart is None or self.apart.is_held:  # nothing else counts while its loop is held up
            return await self.drained(report)
        draining = asyncio.ensure_future(self.apart.call(self.drained, report))
        try:
            await asyncio.wait([draining], timeout=DRAIN_S)
        finally:
            draining.cancel()
        if draining.done():
            return draining.result()
        return await self.drained(report)  # nothing else counts meanwhile: its loop is held up

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
        self.log_fault("the reward", error)
        return missing(Outcome.INFRA, f"raised_{type(error).__name__}", {})

    def log_fault(self, what: str, error: BaseException) -> None:
        """Log an error in a reward's code, once for each place. Its message may hold a customer's text."""
        name, trace = type(error).__name__, error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "an unknown place"
        hint = _OF_ONE_THREAD if any(phrase in str(error) for phrase in _TIED) else ""
        self.log_once(f"{what} raised {name} at {place}; completions it happens to are missing{hint}")

    def log_once(self, line: str) -> None:
        """Log an error, the first time that it comes."""
        if line not in self._logged_faults:
            self._logged_faults.add(line)
            logger.error(line)

    def _batch(self, rows: Sequence[Any], lane: int, number: int, group: int) -> RewardBatch:
        def record(row: Any, completion: str | None, reward: Reward) -> None:
            self.lines.scored(self.row_id(row), completion, reward)

        unit, apart = max(self.unit(group, len(rows)), 1), self.apart
        chain, late = (
            (self.score, lambda: "deadline") if apart is None else (partial(apart.call, self.score), apart.late)
        )
        return RewardBatch(
            rows, chain, self.conclude, self.deadline_s, lane, record, number=number, group=group, unit=unit, late=late
        )
