"""A part of a trainer: what it can train without. Owns the interface, and the list of built-in parts with what turns
each of them on. A part of your own goes into `SalesGRPOTrainer(parts=[...])`."""

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
from salesrl_trl.errors import ConfigError
from salesrl_trl.generation.sampler import Sampler
from salesrl_trl.kl.branched import BranchedKL
from salesrl_trl.reward.figures import RewardFigures
from salesrl_trl.reward.reward_loop import RewardLoop
from salesrl_trl.rollout.pipeline import Pipeline
from salesrl_trl.rollout.rollout_scoring import CompletedBatch, RolloutScoring
from salesrl_trl.telemetry.instruments import Instruments
from salesrl_trl.update.ledger import Ledger
from salesrl_trl.update.run_control import RunControl

if TYPE_CHECKING:
    from salesrl_trl.wiring.trl_access import Hooks  # imports vLLM, which takes seconds

logger = logging.getLogger(__name__)


class PartContext(Protocol):
    """What a part may use of a trainer. TRL's own is behind `trl`."""

    args: SalesGRPOConfig
    trl: "Hooks"
    branches: Branches
    reward_loop: RewardLoop
    figures: RewardFigures
    ledger: Ledger
    sampler: Sampler
    pipeline: Pipeline
    scoring: RolloutScoring
    instruments: Instruments
    run_control: RunControl
    kl: BranchedKL | None
    least_lookahead: int  # at 0 a server and the trainer would wait for each other
    partial_rollouts: float  # the setting, 0 where it has no effect
    recorded_weights: Mapping[str, float]  # of several reward functions
    quick_eval: QuickEvalSettings | None
    parts: "list[Part]"  # all of them, in their order


class Part(TrainerCallback):
    """One part of a trainer, and a callback of transformers.

    All ranks have the same parts in the same order, and call each method together: a method may make a collective,
    except where it says otherwise. Every method does nothing here.
    """

    name: str = ""
    """Under which a checkpoint keeps `state_dict`; the class's name if empty."""
    figure_names: Sequence[str] = ()
    """Names of the figures that `on_batch` returns. Each log line of training has them, NaN where there were none."""
    held_out_figures: Mapping[str, str] = MappingProxyType({})
    """Further figures of the `[HeldOut@]` line: by their name there, the tag in the log of an evaluation."""
    quick_figures: Sequence[Figure] = ()
    """Further figures of quick evaluations."""

    def connect(self, run: PartContext) -> None:
        """The trainer is built, and the parts before this one are connected."""

    def begin(self, resumed: str | None, run_id: str) -> None:
        """`train` begins, from the checkpoint `resumed` if there is one. `run_id`: of the run, over its resumes."""

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Steps begin. `state`: what the checkpoint holds of this part; empty where there is none."""

    def state_dict(self) -> dict[str, object]:
        """What a checkpoint keeps, as values of JSON. Called on the main process alone."""
        return {}

    def on_batch(self, batch: CompletedBatch) -> Mapping[str, float]:
        """All rewards of a batch are in, of training or of an evaluation. Returns figures by `figure_names`, the same
        on all ranks. To stop the run behind its step, with a checkpoint, set `run_control.error` of the `PartContext`
        to a `SalesRLError`, on all ranks alike: `train` raises it."""
        return {}

    def after_step(self, step: int) -> None:
        """An optimizer step is logged, saved and evaluated. Called before the first step of a run too, and maybe twice
        for the last one."""

    def figures(self, mode: str) -> Mapping[str, float]:
        """Figures of a log line of `"train"` or `"eval"`: the same names each time, the same values on all ranks."""
        return {}

    def on_policy_saved(self, folder: Path, state: TrainerState, given: Mapping[str, object]) -> None:
        """The policy lies in a folder without a model card of anybody else's. `given`: what a user asked for by
        `create_model_card`. Called on the main process alone."""

    def card_values(self) -> Mapping[str, object]:
        """What the model card shows of this part, by the names that `parts/model_card.jinja` has."""
        return {}

    def busy_with(self) -> str | None:
        """What a generation that lasts is waiting for, in the words of a heartbeat; `None` if it is not for this."""
        return None

    def cancel(self, reason: str) -> None:
        """End what is under way and all that begins later, which is missing for this reason. From any thread."""

    def end_run(self) -> None:
        """A run is over, also by a failure, or another one begins: close its files. No collective."""

    def close(self) -> None:
        """The trainer is finished. No collective."""


def connect_parts(run: PartContext, parts: list[Part], own: Sequence[Part]) -> None:
    """Add the built-in parts, then a user's `own`, to a trainer's, and connect them in this order."""
    parts += [*built_in(run), *own]
    names = [part.name or type(part).__name__ for part in parts]
    for name in names:
        check(
            names.count(name) == 1,
            f"two parts are named {name!r}. Expected a `name` for each: checkpoints keep their states by it.",
        )
    for part in parts:
        part.connect(run)


def built_in(run: PartContext) -> list[Part]:
    """The parts that the settings ask for, in the order of their collectives. Nothing is imported for the others."""
    args, reward = run.args, run.reward_loop.reward
    held_out = run.trl.eval_dataset
    datasets = held_out.values() if isinstance(held_out, dict) else [held_out]
    has_bbq = any(BBQ_COLUMN in (getattr(each, "column_names", None) or ()) for each in datasets)
    has_quick = run.quick_eval is not None and bool(run.quick_eval.steps)
    # what asks for it comes last; without, a run does without it where its layer is not there
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
        ("parts.trackers:TrackersPart", True, ""),
        ("parts.weight_change:WeightChange", run.trl.updates, ""),
        ("parts.model_card:ModelCard", True, ""),
        # behind all that logs figures
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
    """A module of a layer, or one that a run may do without. Raises `ConfigError` where its layer, or a package of
    its, is not installed."""
    try:
        return importlib.import_module(f"salesrl_trl.{module}")
    except ModuleNotFoundError as error:
        raise lacking(module.partition(".")[0], asked_by, str(error.name)) from error


def lacking(layer: str, asked_by: str, package: str) -> ConfigError:
    extra = f"[{layer}]" if layer in EXTRAS else ""
    return ConfigError(
        f"{asked_by or 'it'} needs the layer `salesrl_trl.{layer}`, and `{package}` is not installed. Expected all "
        f"of it: pip install 'salesrl_trl{extra}'."
    )


EXTRAS = ("agents", "demo")  # layers with packages that the core does not bring

BBQ_COLUMN = "stereotyped_groups"  # of rows of BBQ alone: an evaluation of them has BBQ's scores
