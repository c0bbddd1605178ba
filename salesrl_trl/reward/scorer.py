"""`Scorer`, the interface of every reward. Users write functions, stages or a judge instead."""

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

DEADLINE_S = 300.0  # default seconds per completion
AT_ONCE = 128  # concurrency of a reward without its own limit: local computation shares the cores with generation
TRL_ARGUMENTS = ("trainer_state",)  # arguments of a reward function in addition to the columns of a row
METER = "judge_meter"  # column that marks rows judged only for the drift monitor


class Per(Enum):
    """What one call of a function scores."""

    COMPLETION = "completion"
    GROUP = "group"
    BATCH = "batch"

    def size(self, group: int, batch: int) -> int:
        """Number of neighbouring completions scored in one call."""
        return max({Per.COMPLETION: 1, Per.GROUP: group, Per.BATCH: batch}[self], 1)


_ALWAYS = ("completion_ids", "log_extra", "log_metric", *TRL_ARGUMENTS)
ARGUMENTS = {
    Per.COMPLETION: ("prompt", "completion", *_ALWAYS),
    Per.GROUP: ("prompt", "completions", *_ALWAYS),
    Per.BATCH: ("prompts", "completions", *_ALWAYS),
}
"""Arguments a function may accept in addition to dataset columns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """The columns that a function requires."""

    function: str
    per: Per
    columns: frozenset[str]  # of the dataset

    def check(self, columns: Sequence[str]) -> None:
        """Raise `ConfigError` if a dataset with these columns lacks one."""
        lacking = sorted(self.columns - {*columns})
        if lacking:
            raise ConfigError(
                f"the reward function {self.function!r}, which scores a {self.per.value}, requires "
                f"{', '.join(map(repr, lacking))}. Expected {', '.join(ARGUMENTS[self.per])}, or a column of the "
                f"dataset: {', '.join(columns)}. Add the column, rename the argument, or give it a default."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeterSettings:
    """The settings of a judge's drift monitor."""

    share: float = 0.02  # maximum calls of the monitor per completion
    on_alarm: str = "warn"
    shows_text: bool = False  # whether log lines may quote customers


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardNames:
    """Static properties of a reward: known before its first use and identical in every process."""

    functions: Mapping[str, str] = field(default_factory=dict)
    """The functions that TRL weights and logs individually: a unique name, and the one under which TRL logs it."""
    together: Per = Per.COMPLETION
    columns: frozenset[str] | None = None  # the columns that it reads; `None` for all
    at_once: int = AT_ONCE  # its concurrency
    needs: tuple[Needs, ...] = ()
    providers: tuple[str, ...] = ()  # judge providers, in fallback order
    components: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()  # custom stages, in order
    services: tuple[str, ...] = ()  # services whose traffic is counted
    places: Mapping[str, str] = field(default_factory=dict)  # each service's address, with its model
    required: tuple[tuple[str, ...], ...] = ()
    """At least one service of each tuple must answer; otherwise nothing can be scored."""
    judges_groups: bool = False  # whether a judge scores the completions of a prompt in one call
    meter: MeterSettings | None = None  # of the judge's drift monitor, if enabled

    @property
    def has_actions(self) -> bool:
        """Whether completions are actions, which may be invalid, as in the built-in reward pipeline."""
        return FORMAT in self.components

    def unusable(self, warm_up: Mapping[str, float | ServiceError]) -> list[ServiceError]:
        """The errors from `Scorer.warm_up` that make scoring impossible."""
        errors = {name: result for name, result in warm_up.items() if isinstance(result, ServiceError)}
        lost = (names for names in self.required if not {*names} & (warm_up.keys() - errors.keys()))
        return [errors[name] for names in lost for name in names if name in errors]


class Scorer(ABC):
    """A reward: scores one completion at a time.

    Subclasses implement `score`. The object is picklable until its first use, and then belongs to one event loop.
    `deadline_s`: seconds allowed per completion. `budget` belongs to the reward's event loop, except for its `path`
    and `limits`. `records`: whether calls and verdicts are kept; a trainer with `record` sets it.
    """

    is_replay = False  # whether a recording answers, which looks rows up by id
    is_apart = False  # whether it runs in a separate process
    is_played = False  # whether its own episodes produce the completions
    _names: RewardNames | None = None  # of other rewards that it wraps

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.deadline_s = deadline_s
        self.lines = batches.SampleLines()
        self.faults = FaultLog()
        self.budget: SharedBudget | None = None
        self.records = False

    @abstractmethod
    async def score(self, sample: Sample, stages: StageTimes) -> Reward:
        """Score one completion; unscored if a service or the judge fails. `stages` times calls: `await
        stages.timed(call, "judge")`."""

    @property
    def names(self) -> RewardNames:
        return self._names or RewardNames(functions={self.own_name: self.own_name})

    def unit(self, group: int, size: int) -> int:
        """Number of neighbouring completions scored in one call, of `group` per prompt and `size` per batch."""
        return self.names.together.size(group, size)

    async def prepare(self, rows: Iterable[Example]) -> None:  # noqa: B027  optional
        """Prefetch whatever does not depend on the policy, before these rows' completions arrive."""

    async def warm_up(self) -> dict[str, float | ServiceError]:
        """Call every service once. Returns each service's response time in seconds, or its error with the address."""
        return {}

    def order_of(self, step: int) -> list[list[int]] | None:
        """In a replay, the order in which parts of a step's batch were trained on; `None` if unknown."""
        return None

    async def recorded_call(self, service: str, asked: str) -> tuple[str | None, str] | None:
        """In a replay, a tool call's recorded answer and failure; `None` if the tool should be called. Raises
        `ServiceError` if the call was not recorded."""
        return None

    async def drain(self) -> BatchReport:
        """The services' activity since the last call, without timings."""
        return batches.NOTHING_SCORED

    async def aclose(self) -> None:
        """Release the running event loop's resources and settle its budget."""
        if self.budget is not None:
            self.budget.settle()

    @property
    def own_name(self) -> str:
        """The name after which TRL names metrics."""
        name: str = getattr(self, "__name__", type(self).__name__)
        return name

    async def score_all(
        self, rows: Sequence[Example], completions: Sequence[Completion], token_ids: Sequence[Sequence[int]] = (),
        group: int = 1,
    ) -> BatchResult:  # fmt: skip
        """Score completions for these rows on the running event loop."""
        batch = RewardBatch(self, rows, group)
        batch.start_all(completions, token_ids)
        await batches.wait_for([batch], batch.is_settled)
        return batch.result(await self.drain())

    async def __call__(
        self, /, *, prompts: Sequence[object], completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]] = (), log_extra: LogExtra | None = None,
        log_metric: LogMetric | None = None, trainer_state: object = None, **columns: Sequence[object],
    ) -> list[float | None]:  # fmt: skip
        """Score a batch as called by TRL's own `GRPOTrainer`. Neighbours with equal prompts form a group."""
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
