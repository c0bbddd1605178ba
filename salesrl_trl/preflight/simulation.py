"""The load of a training run on a RAG service and a judge, without a model or a GPU: settings, checks, load, report.

Called by `scripts/simulate_training_rewards.py`, and by `train` for `mode: rewards`. The reward chain of training
scores; `made_up` makes the completions, and `simulated` the figures.
"""

import functools
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import stamina

from salesrl_trl.build.assembly import addresses, build_reward
from salesrl_trl.build.checks.reward import RewardParts, prepare_reward
from salesrl_trl.build.services_plan import ServicesConfig, ServicesPlan, StepSettings
from salesrl_trl.build.settings import parse_part
from salesrl_trl.config import DataConfig, RewardConfig
from salesrl_trl.config.ranges import Count, Share, check_settings, check_value
from salesrl_trl.data.files import DEMO
from salesrl_trl.data.sources import load_drafts
from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.shutdown import EXIT_FAILED
from salesrl_trl.preflight.made_up import DEFAULT_MIX, VARIANTS, Completion, batches
from salesrl_trl.preflight.simulated import SimulatedStep, report_text, step_summary, step_text, summarise
from salesrl_trl.reward.reward_loop import RewardLoop, warm_up
from salesrl_trl.run.tools import exit_code_of, strict_json
from salesrl_trl.types import DEFAULT_FORMAT, SalesRow


@dataclass
class SimulationConfig:
    """The settings that a simulation adds to those of a run."""

    steps: Count = field(default=5, metadata={"help": "generation batches to score"})
    prompts_per_step: Count = field(default=6, metadata={"help": "rows of a batch"})
    variants: str = field(
        default="", metadata={"help": "kinds of completions, in equal shares; a realistic mix if empty"}
    )
    json: bool = field(default=False, metadata={"help": "one JSON object on stdout, progress on stderr"})
    show_text: bool = field(default=False, metadata={"help": "show completions, which quote customers"})

    def __post_init__(self) -> None:
        check_settings(self)
        unknown = [name for name in self.mix if name not in VARIANTS]
        if unknown:
            raise ConfigError(f"`variants` names {unknown}. Expected some of: {','.join(VARIANTS)}. Correct it.")

    @property
    def mix(self) -> list[str]:
        """Variants, each as often as its share is."""
        if self.variants:
            return [name.strip() for name in self.variants.split(",")]
        return [name for name, weight in DEFAULT_MIX.items() for _ in range(weight)]


def prepare_simulation(argv: Sequence[str]) -> Callable[[], int]:
    """Read the settings and check all that can be checked before the load. Returns `run` with its arguments."""
    simulation, data, reward, training = parse_part(argv, (SimulationConfig, DataConfig, RewardConfig, StepSettings))
    check_value("num_generations", training.num_generations, Count)
    check_value("min_valid_reward_fraction", training.min_valid_reward_fraction, Share)
    if reward.action_format() != DEFAULT_FORMAT:
        raise ConfigError(
            f"`action_fields` is {', '.join(reward.action_fields)}. Expected {', '.join(DEFAULT_FORMAT.fields)}: the "
            "simulation writes no other actions. Leave it out."
        )
    rows = ServicesPlan(ServicesConfig(data, reward, training)).train_rows
    if not reward.uses_rag:
        raise ConfigError(
            "`reward_funcs` has no `sales`, and made-up completions are actions for the packaged chain. Expected the "
            "chain. Leave out `reward_funcs`."
        )
    drafts = {row.row_id: draft for row, draft in load_drafts()} if data.dataset == DEMO else {}
    planned = batches(
        rows, drafts, mix=simulation.mix, prompts=simulation.prompts_per_step, generations=training.num_generations,
        seed=training.seed,
    )  # fmt: skip
    rag = "as configured" if not reward.embeds_rag else "embedded"  # no address: some hold a password
    judge = "as configured" if reward.judge_base_url or reward.judge_providers else "embedded"
    title = (
        f"{simulation.steps} steps of {simulation.prompts_per_step} x {training.num_generations} completions for "
        f"{len(rows)} rows of {data.dataset}, seed {training.seed}; RAG service: {rag}, judge: {judge}"
    )
    parts, least = prepare_reward(reward, training.branches), training.min_valid_reward_fraction
    return functools.partial(run, simulation, reward, parts, rows, planned, title, least)


def run(
    simulation: SimulationConfig,
    config: RewardConfig,
    parts: RewardParts,
    rows: Sequence[SalesRow],
    planned: Iterable[list[Completion]],
    title: str,
    least: float,
) -> int:
    """Simulate, print, and return the exit code. Training would skip a step with fewer rewards than `least`."""
    show = functools.partial(print, file=sys.stderr if simulation.json else sys.stdout, flush=True)
    show(title)
    steps, summaries = list[SimulatedStep](), []
    with addresses(config) as urls, tempfile.TemporaryDirectory() as folder:
        # answers of an earlier run would take load off the services
        reward = build_reward(config, parts, rows, *urls, output_dir=Path(folder), keeps_references=False)
        reward_loop = RewardLoop(reward)
        try:
            if config.warm_up_services:
                warm_up(reward_loop, functools.partial(print, file=sys.stderr))
            for number, batch in enumerate(itertools.islice(planned, simulation.steps), 1):
                begun = reward_loop.begin([{"row": made.row} for made in batch])
                result = reward_loop.result(begun, [made.text for made in batch])
                steps.append(SimulatedStep(batch, list(result.rewards), result.report))
                summaries.append(step_summary(number, steps[-1], simulation.show_text))
                show(step_text(summaries[-1], simulation.steps))
        finally:
            reward_loop.close()
    summary = summarise(steps, least, config)
    if simulation.json:
        print(strict_json({"steps": summaries, **summary}))
    else:
        print(report_text(summary, simulation.steps, least))
    return EXIT_FAILED if summary["skipped_steps"] else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare and run. Returns the exit code."""
    stamina.instrumentation.set_on_retry_hooks([])  # failures are counted by reason, not logged call by call
    argv = sys.argv[1:] if argv is None else argv
    return exit_code_of(argv, functools.partial(prepare_simulation, argv))
