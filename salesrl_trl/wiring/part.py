"""Parts are optional components of a trainer. Defines their interface, and which settings enable the built-in ones.
Pass your own as `SalesGRPOTrainer(parts=[...])`."""

import importlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Protocol

from transformers import TrainerCallback, TrainerState

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.config.checks import check
from salesrl_trl.config.quick_evaluations import Figure, QuickEvalSettings
from salesrl_trl.data.branches import Branches
from salesrl_trl.errors import ConfigError, ServiceError
from salesrl_trl.generation.sampler import Sampler
from salesrl_trl.kl.branched import BranchedKL
from salesrl_trl.reward.figures import RewardFigures
from salesrl_trl.reward.reward_loop import RewardLoop
from salesrl_trl.rollout.model_passes import Passes
from salesrl_trl.rollout.pipeline import Pipeline
from salesrl_trl.rollout.rollout_scoring import CompletedBatch, RolloutScoring
from salesrl_trl.telemetry.instruments import Instruments
from salesrl_trl.telemetry.logs import hide_lines
from salesrl_trl.update.ledger import Ledger
from salesrl_trl.update.run_control import RunControl

if TYPE_CHECKING:
    from salesrl_trl.wiring.trl_access import Hooks  # imports vLLM, which takes seconds

logger = logging.getLogger(__name__)


class PartContext(Protocol):
    """What a part may use of a trainer. `trl` is the access to TRL's."""

    args: SalesGRPOConfig
    trl: "Hooks"
    branches: Branches
    reward_loop: RewardLoop
    figures: RewardFigures
    ledger: Ledger
    sampler: Sampler
    pipeline: Pipeline
    passes: Passes
    scoring: RolloutScoring
    instruments: Instruments
    run_control: RunControl
    kl: BranchedKL | None
    least_lookahead: int  # with 0, a server and the trainer would wait for each other
    partial_rollouts: float  # the setting, or 0 if ineffective
    recorded_weights: Mapping[str, float]  # of several reward functions
    quick_eval: QuickEvalSettings | None
    parts: "list[Part]"  # all parts, in order


class Part(TrainerCallback):
    """A part of a trainer, which is also a transformers callback.

    All ranks have the same parts in the same order and call each method together, so methods may use collectives
    unless documented otherwise. The base methods do nothing.
    """

    name: str = ""
    """Key of its `state_dict` in checkpoints; defaults to the class name."""
    figure_names: Sequence[str] = ()
    """Names of the metrics returned by `on_batch`. Every training log line has them, NaN if there were none."""
    held_out_figures: Mapping[str, str] = MappingProxyType({})
    """Additional metrics in the `[HeldOut@]` line: label there to tag in the evaluation's log."""
    quick_figures: Sequence[Figure] = ()
    """Additional metrics for quick evaluations."""

    def connect(self, run: PartContext) -> None:
        """Called once the trainer is built and the preceding parts are connected."""

    def begin(self, resumed: str | None, run_id: str) -> None:
        """Called when `train` begins, from the checkpoint `resumed` if any. `run_id` persists across resumes."""

    def warm_up(self) -> Mapping[str, float | ServiceError]:
        """Called before training: call each service once. Returns seconds by name, or an error that ends the run."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Called before the first step. `state`: this part's state from the checkpoint, or empty."""

    def state_dict(self) -> dict[str, object]:
        """State for a checkpoint, as JSON values. Called on the main process only."""
        return {}

    def on_batch(self, batch: CompletedBatch) -> Mapping[str, float]:
        """Called when all rewards of a training or evaluation batch have arrived. Returns metrics named in
        `figure_names`, equal on all ranks. To stop the run after its step, with a checkpoint, set the `PartContext`'s
        `run_control.error` to a `SalesRLError` on all ranks; `train` raises it."""
        return {}

    def after_step(self, step: int) -> None:
        """Called after an optimizer step is logged, saved and evaluated, also before a run's first step, and possibly
        twice for the last one."""

    def figures(self, mode: str) -> Mapping[str, float]:
        """Metrics for a `"train"` or `"eval"` log line: the same names each time, the same values on all ranks."""
        return {}

    def on_policy_saved(self, folder: Path, state: TrainerState, given: Mapping[str, object]) -> None:
        """Called when the policy was saved to a folder without a foreign model card. `given`: arguments of
        `create_model_card`. Called on the main process only."""

    def card_values(self) -> Mapping[str, object]:
        """This part's values for the model card, by their names in `parts/model_card.jinja`."""
        return {}

    def busy_with(self) -> str | None:
        """Text for the heartbeat if a long generation is waiting for this part, else `None`."""
        return None

    def cancel(self, reason: str) -> None:
        """Cancel pending and future work, which counts as failed for this reason. May be called from any thread."""

    def end_run(self) -> None:
        """Called when a run ends, also by failure, or another begins: close its files. No collectives."""

    def close(self) -> None:
        """Called when the trainer is closed. No collectives."""


def connect_parts(run: PartContext, parts: list[Part], own: Sequence[Part]) -> None:
    """Add the built-in parts and then the user's `own` to `parts`, and connect them in this order."""
    parts += [*built_in(run), *own]
    hide_lines()  # again, for the loggers of modules that were imported just now
    names = [part.name or type(part).__name__ for part in parts]
    for name in names:
        check(
            names.count(name) == 1,
            f"two parts are named {name!r}. Expected unique names: checkpoints store their states by name.",
        )
    for part in parts:
        part.connect(run)


def built_in(run: PartContext) -> list[Part]:
    """The parts enabled by the settings, in the order of their collectives. The others are not imported."""
    args, reward = run.args, run.reward_loop.reward
    held_out = run.trl.eval_dataset
    datasets = held_out.values() if isinstance(held_out, dict) else [held_out]
    has_bbq = any(BBQ_COLUMN in (getattr(each, "column_names", None) or ()) for each in datasets)
    has_quick = run.quick_eval is not None and bool(run.quick_eval.steps)
    # the last entry is what requires it; if empty, the part is skipped when its layer is not installed
    wanted = (
        ("parts.run_banner:Banner", True, ""),
        ("parts.step_lines:StepLine", True, ""),
        ("parts.step_lines:EpochTotals", True, ""),
        ("agents.agents_part:AgentsPart", run.trl.tools is not None or reward.is_played, "tools or episodes"),
        ("judged.spending:Spending", reward.budget is not None, "a budget"),
        ("parts.lookahead:LookaheadPart", bool(args.max_rollout_lookahead), ""),
        ("judged.meter_part:JudgeMeter", reward.names.meter is not None, "`judge_meter`"),
        ("record.recorder:RecorderPart", bool(args.record), "`record`"),
        ("launch.evaluation.bbq:BBQPart", has_bbq, f"the column `{BBQ_COLUMN}`"),
        ("launch.evaluation.held_out:HeldOut", True, ""),
        ("launch.evaluation.quick:QuickEvalPart", has_quick, "`quick_eval`"),
        ("parts.lora:LoraLayers", hasattr(run.trl.model(), "peft_config"), ""),
        ("parts.kept_activations:KeptActivations", run.trl.updates and args.kept_activations_gib > 0, ""),
        ("parts.trackers:TrackersPart", True, ""),
        ("parts.weight_change:WeightChange", run.trl.updates, ""),
        ("parts.model_card:ModelCard", True, ""),
        # after everything that logs metrics
        ("record.recorder:ClosingReport", "tensorboard" in args.report_to, ""),
    )
    parts: list[Part] = []
    for place, is_on, asked_by in wanted:
        if not is_on:
            continue
        module, _, kind = place.partition(":")
        try:
            parts.append(getattr(layer(module, asked_by), kind)())
        except ConfigError as error:
            if asked_by:
                raise
            logger.info(f"off: {kind}, because {error}")
    return parts


def layer(module: str, asked_by: str = "") -> ModuleType:
    """Imports a module of a layer, or an optional one. Raises `ConfigError` if it or a dependency is missing."""
    try:
        return importlib.import_module(f"salesrl_trl.{module}")
    except ModuleNotFoundError as error:
        raise lacking(module.partition(".")[0], asked_by, str(error.name)) from error


def lacking(layer: str, asked_by: str, package: str) -> ConfigError:
    extra = f"[{layer}]" if layer in EXTRAS else ""
    return ConfigError(
        f"{asked_by or 'it'} needs the layer `salesrl_trl.{layer}`, and `{package}` is not installed. To install it: "
        f"pip install 'salesrl_trl{extra}'."
    )


EXTRAS = ("agents", "demo")  # layers with extra dependencies

BBQ_COLUMN = "stereotyped_groups"  # only in BBQ's rows, whose evaluation computes BBQ's scores
