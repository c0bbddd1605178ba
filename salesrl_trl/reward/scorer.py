"""The interface of every reward: `Scorer`. A user writes functions, stages or a judge, not this."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from salesrl_trl.errors import ConfigError, ServiceError
from salesrl_trl.reward import batch as batches
from salesrl_trl.reward.batch import BatchReport, BatchResult, Completion, LogExtra, LogMetric, RewardBatch, Sample
from salesrl_trl.reward.stage_times import FaultLog, StageTimes
from salesrl_trl.service.breaker import SharedBudget
from salesrl_trl.types import FORMAT, Example, Reward

DEADLINE_S = 300.0  # seconds that a completion may take by default
AT_ONCE = 128  # calls at once of a reward that states no limit: what computes shares the cores with generation
TRL_ARGUMENTS = ("trainer_state",)  # what a reward function may ask for beside the columns of a row
METER = "judge_meter"  # column of a row that is judged for the drift monitor alone


class Per(Enum):
    """What a function scores at once."""

    COMPLETION = "completion"
    GROUP = "group"
    BATCH = "batch"

    def size(self, group: int, batch: int) -> int:
        """Number of neighbours that are scored together."""
        return max({Per.COMPLETION: 1, Per.GROUP: group, Per.BATCH: batch}[self], 1)


_ALWAYS = ("completion_ids", "log_extra", "log_metric", *TRL_ARGUMENTS)
ARGUMENTS = {
    Per.COMPLETION: ("prompt", "completion", *_ALWAYS),
    Per.GROUP: ("prompt", "completions", *_ALWAYS),
    Per.BATCH: ("prompts", "completions", *_ALWAYS),
}
"""What a function may take beside columns of the dataset."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a function can't be called without."""

    function: str
    per: Per
    columns: frozenset[str]  # of the dataset

    def check(self, columns: Sequence[str]) -> None:
        """Raise `ConfigError` if a dataset of these columns lacks one."""
        lacking = sorted(self.columns - {*columns})
        if lacking:
            raise ConfigError(
                f"the reward function {self.function!r}, which scores a {self.per.value}, takes "
                f"{', '.join(map(repr, lacking))}. Expected {', '.join(ARGUMENTS[self.per])}, or a column of the "
                f"dataset: {', '.join(columns)}. Add the column, rename the argument, or give it a default."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeterSettings:
    """What a reward states of its judge's drift monitor."""

    share: float = 0.02  # most calls of the meter, for each completion
    on_alarm: str = "warn"
    shows_text: bool = False  # whether lines may quote customers


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardNames:
    """What is known of a reward before its first use. It is the same in every process, and never changes."""

    functions: Mapping[str, str] = field(default_factory=dict)
    """The numbers that TRL weighs and logs by themselves: a name of each, and the one that TRL logs it under."""
    together: Per = Per.COMPLETION
    columns: frozenset[str] | None = None  # the columns of a row that it reads; `None` for all
    at_once: int = AT_ONCE  # calls that it is made for, at once
    needs: tuple[Needs, ...] = ()
    providers: tuple[str, ...] = ()  # judge providers, in fallback order
    components: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()  # the user's stages, in their order
    services: tuple[str, ...] = ()  # the services with traffic of their own
    places: Mapping[str, str] = field(default_factory=dict)  # the address of each service, with its model
    required: tuple[tuple[str, ...], ...] = ()
    """Services of which one of each tuple has to answer: without it nothing could be scored."""
    judges_groups: bool = False  # whether a judge scores the completions of a prompt together
    meter: MeterSettings | None = None  # of the meter over the judge, if there is one

    @property
    def has_actions(self) -> bool:
        """Whether completions are actions that may be invalid: in the packaged chain."""
        return FORMAT in self.components

    def unusable(self, warm_up: Mapping[str, float | ServiceError]) -> list[ServiceError]:
        """The errors of a `Scorer.warm_up` after which nothing could be scored."""
        errors = {name: result for name, result in warm_up.items() if isinstance(result, ServiceError)}
        lost = (names for names in self.required if not {*names} & (warm_up.keys() - errors.keys()))
        return [errors[name] for names in lost for name in names if name in errors]


class Scorer(ABC):
    """A reward: scores one completion at a time.

    A subclass has to write `score`. The object is picklable before its first use, and then belongs to one event loop.
    `deadline_s`: seconds a completion may take from its start. `budget` belongs to the reward's event loop, but for
    its `path` and `limits`. `records`: whether calls and verdicts are kept; a trainer with `record` sets it.
    """

    is_replay = False  # whether a record answers, which knows rows by their ids
    is_apart = False  # whether it runs in a process of its own
    is_played = False  # whether its own episodes make the completions

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.deadline_s = deadline_s
        self.lines = batches.SampleLines()
        self.faults = FaultLog()
        self.budget: SharedBudget | None = None
        self.records = False

    @abstractmethod
    async def score(self, sample: Sample, stages: StageTimes) -> Reward:
        """The reward of one completion, without a value where a service or the judge failed. `stages` times calls:
        `await stages.timed(call, "judge")`."""

    @property
    def names(self) -> RewardNames:
        return RewardNames(functions={self.own_name: self.own_name})

    async def prepare(self, rows: Iterable[Example]) -> None:  # noqa: B027  for those that have something to prepare
        """Ask for what does not depend on the policy, before these rows' completions come."""

    async def warm_up(self) -> dict[str, float | ServiceError]:
        """Ask every service once. Returns by service the seconds of its answer, or its error with the place."""
        return {}

    def order_of(self, step: int) -> list[list[int]] | None:
        """In a replay: in which order the parts of a step's batch were trained on. `None` where that is not known."""
        return None

    async def recorded_call(self, service: str, asked: str) -> tuple[str | None, str] | None:
        """In a replay: how a call of a tool ended, its answer and its failure. `None` where the tool is to be called.
        Raises `ServiceError` for a call that is not recorded."""
        return None

    async def drain(self) -> BatchReport:
        """Everything that services did since the last call. Without times."""
        return batches.NOTHING_SCORED

    async def aclose(self) -> None:
        """Close what belongs to the running event loop, and settle the account of its budget."""
        if self.budget is not None:
            self.budget.settle()

    @property
    def own_name(self) -> str:
        """TRL names metrics after it."""
        name: str = getattr(self, "__name__", type(self).__name__)
        return name

    async def score_all(
        self, rows: Sequence[Example], completions: Sequence[Completion], token_ids: Sequence[Sequence[int]] = (),
        group: int = 1,
    ) -> BatchResult:  # fmt: skip
        """The rewards of completions to these rows, on the running event loop."""
        batch = RewardBatch(self, rows, group)
        batch.start_all(completions, token_ids)
        await batches.wait_for([batch], batch.is_settled)
        return batch.result(await self.drain())

    async def __call__(
        self, /, *, prompts: Sequence[object], completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]] = (), log_extra: LogExtra | None = None,
        log_metric: LogMetric | None = None, trainer_state: object = None, **columns: Sequence[object],
    ) -> list[float | None]:  # fmt: skip
        """Score a batch, as TRL's own `GRPOTrainer` asks for it. Neighbours with equal prompts are a group."""
        of_trl = {} if trainer_state is None else {"trainer_state": trainer_state}
        rows = [
            {"prompt": prompt, **of_trl, **{name: values[place] for name, values in columns.items()}}
            for place, prompt in enumerate(prompts)
        ]
        group = next((place for place, prompt in enumerate(prompts) if prompt != prompts[0]), len(prompts))
        result = await self.score_all(rows, completions, completion_ids, group=max(group, 1))
        if log_extra and log_metric:
            result.log(log_extra, log_metric)
        return result.values
