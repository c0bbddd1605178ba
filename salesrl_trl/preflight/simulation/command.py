"""The order of a simulation: settings, checks, load, report.

Owns the settings that a simulation adds to those of a run. Refuses to count or to judge: `findings` does.
"""

import dataclasses
import functools
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import stamina

from salesrl_trl.build.assembly import addresses, build_reward
from salesrl_trl.build.checks.reward import RewardParts, prepare_reward
from salesrl_trl.build.checks.rows import own_records, training_records
from salesrl_trl.build.settings import parse_part
from salesrl_trl.config import DataConfig, RewardConfig
from salesrl_trl.data.sources import DEMO, check_rows, load_drafts
from salesrl_trl.errors import ConfigError, ServiceError, ServiceUnavailable
from salesrl_trl.ground.shutdown import EXIT_STOPPED
from salesrl_trl.preflight.simulation.completions import DEFAULT_MIX, VARIANTS, Completion, Fields, batches
from salesrl_trl.preflight.simulation.findings import Step, step_summary, summarise
from salesrl_trl.preflight.simulation.text import report_text, step_text
from salesrl_trl.reward.reward_loop import RewardLoop
from salesrl_trl.run.tools import exit_code_of, strict_json
from salesrl_trl.types import DEFAULT_FORMAT, SalesRow

DESCRIPTION = (
    "The load of a training run, without a model or a GPU. Takes a recipe and every setting of a training line. Of "
    "the training settings, `seed`, `num_generations`, `branches` and `min_valid_reward_fraction` count."
)


@dataclass
class SimulationConfig:
    """The settings that a simulation adds to those of a run."""

    steps: int = field(default=5, metadata={"help": "generation batches to score"})
    prompts_per_step: int = field(default=6, metadata={"help": "rows of a batch"})
    variants: str = field(
        default="", metadata={"help": "kinds of completions, in equal shares; a realistic mix if empty"}
    )
    json: bool = field(default=False, metadata={"help": "one JSON object on stdout, progress on stderr"})
    show_text: bool = field(default=False, metadata={"help": "show completions, which quote customers"})

    def __post_init__(self) -> None:
        _check_count("steps", self.steps)
        _check_count("prompts_per_step", self.prompts_per_step)
        unknown = [name for name in self.mix if name not in VARIANTS]
        if unknown:
            raise ConfigError(f"`variants` names {unknown}. Expected some of: {','.join(VARIANTS)}. Correct it.")

    @property
    def mix(self) -> list[str]:
        """Variants, each as often as its share is."""
        if self.variants:
            return [name.strip() for name in self.variants.split(",")]
        return [name for name, weight in DEFAULT_MIX.items() for _ in range(weight)]


@dataclass(frozen=True, slots=True)
class Training:
    """The training settings that shape the load. The other ones are accepted and ignored."""

    seed: int
    num_generations: int
    min_valid_reward_fraction: float
    branches: list[str]

    def __post_init__(self) -> None:
        _check_count("num_generations", self.num_generations)
        if not 0 <= self.min_valid_reward_fraction <= 1:
            raise ConfigError(f"`min_valid_reward_fraction` is {self.min_valid_reward_fraction}. Expected 0 to 1.")


class Settings(NamedTuple):
    """All settings of a simulation, by owner."""

    simulation: SimulationConfig
    data: DataConfig
    reward: RewardConfig
    training: Training


class Prepared(NamedTuple):
    """The results of the checks."""

    rows: list[SalesRow]
    drafts: dict[str, list[Fields]]
    """Valid actions, by row id."""
    parts: RewardParts


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"`{name}` is {value!r}. Expected a whole number from 1 on.")


def parse(argv: Sequence[str]) -> Settings:
    """Read the settings, from a recipe if one is named. The command line wins. Raises `ConfigError`."""
    simulation, data, reward, others = parse_part(
        argv,
        (SimulationConfig, DataConfig, RewardConfig),
        usage="%(prog)s [--config RECIPE.yaml] [--SETTING VALUE ...]",
        description=DESCRIPTION,
    )
    if reward.reference_cache is None:  # answers of an earlier run would take load off the services
        reward = dataclasses.replace(reward, reference_cache="")
    training = Training(**{each.name: getattr(others, each.name) for each in dataclasses.fields(Training)})
    return Settings(simulation, data, reward, training)


def prepare(settings: Settings) -> Prepared:
    """Check everything that can be checked before the load. Raises `SalesRLError`."""
    _, data, reward, training = settings
    if reward.action_format() != DEFAULT_FORMAT:
        raise ConfigError(
            f"`action_fields` is {', '.join(reward.action_fields)}. Expected {', '.join(DEFAULT_FORMAT.fields)}: the "
            "simulation writes no other actions. Leave it out."
        )
    return Prepared(
        rows=check_rows(training_records(data, own_records(data)), training.branches, data.max_train_rows),
        drafts={row.row_id: each for row, each in load_drafts()} if data.dataset == DEMO else {},
        parts=prepare_reward(_with_services(reward), training.branches),
    )


def simulate(
    reward_loop: RewardLoop, planned: Iterator[list[Completion]], warm_up: bool, report: Callable[[int, Step], None]
) -> list[Step]:
    """Score every planned batch, one after the other.

    Args:
        reward_loop (`RewardLoop`):
            Scores the completions.
        planned (`Iterator[list[Completion]]`):
            The batches.
        warm_up (`bool`):
            Ask every service once before.
        report (`Callable[[int, Step], None]`):
            Called with the number of each step and the step.

    Raises:
        `ServiceUnavailable`: a service did not pass the warm-up.
    """
    if warm_up:
        _warm_up(reward_loop)
    steps: list[Step] = []
    for number, batch in enumerate(planned, start=1):
        result = reward_loop.result(
            reward_loop.begin([{"row": each.row} for each in batch]), [each.case.text for each in batch]
        )
        steps.append(Step(batch, list(result.rewards), result.report))
        report(number, steps[-1])
    return steps


def _with_services(reward: RewardConfig) -> RewardConfig:
    if not reward.uses_services:
        raise ConfigError(
            "`reward_funcs` has no `sales`, and made-up completions are actions for the packaged chain. Expected the "
            "chain. Leave out `reward_funcs`."
        )
    return reward


def _warm_up(reward_loop: RewardLoop) -> None:
    results = reward_loop.warm_up()
    for name, result in results.items():
        text = result.code if isinstance(result, ServiceError) else f"{result:.2f} s"
        print(f"[WarmUp] {name}: {text}", file=sys.stderr)
    for error in reward_loop.reward.names.unusable(results):
        raise ServiceUnavailable(
            f"the services did not pass their warm-up, so nothing could be scored: {error} Mend the service and try "
            "again (`warm_up_services: false` leaves the check out)."
        )


def run(prepared: Prepared, settings: Settings) -> int:
    """Simulate and print. Returns the exit code. Raises `SalesRLError` if the services do not work."""
    simulation, _, config, training = settings
    rows, drafts, parts = prepared
    planned = batches(
        rows, drafts, mix=simulation.mix, prompts=simulation.prompts_per_step, generations=training.num_generations,
        seed=training.seed,
    )  # fmt: skip
    progress = sys.stderr if simulation.json else sys.stdout

    def report(number: int, step: Step) -> None:
        text = step_text(step_summary(number, step, simulation.show_text), simulation.steps)
        print(text, file=progress, flush=True)

    print(_head(len(rows), settings), file=progress, flush=True)
    with addresses(config) as urls, tempfile.TemporaryDirectory() as folder:
        reward_loop = RewardLoop(build_reward(config, parts, rows, *urls, output_dir=Path(folder)))
        try:
            steps = simulate(reward_loop, itertools.islice(planned, simulation.steps), config.warm_up_services, report)
        finally:
            reward_loop.close()
    summary = summarise(steps, training.min_valid_reward_fraction, config)
    if simulation.json:
        each = [step_summary(number, step, simulation.show_text) for number, step in enumerate(steps, 1)]
        print(strict_json({"steps": each, **summary}))
    else:
        print(report_text(summary, simulation.steps, training.min_valid_reward_fraction))
    return EXIT_STOPPED if summary["skipped_steps"] else 0


def _head(rows: int, settings: Settings) -> str:
    """The line at the start. It holds no address: some addresses hold a password."""
    simulation, data, config, training = settings
    rag = "as configured" if config.rag_base_url else "embedded"
    judge = "as configured" if config.judge_base_url or config.judge_providers else "embedded"
    return (
        f"{simulation.steps} steps of {simulation.prompts_per_step} x {training.num_generations} completions for "
        f"{rows} rows of {data.dataset}, seed {training.seed}; RAG service: {rag}, judge: {judge}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, prepare, run. Returns the exit code."""
    stamina.instrumentation.set_on_retry_hooks([])  # failures are counted by reason, not logged call by call
    given = sys.argv[1:] if argv is None else argv

    def prepared() -> Callable[[], int]:
        settings = parse(given)
        return functools.partial(run, prepare(settings), settings)

    return exit_code_of(given, prepared)
