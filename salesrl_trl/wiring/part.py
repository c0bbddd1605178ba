"""A part of a trainer: what it can train without. Recorder, evaluations, spending and trackers are parts.

Owns the interface and the list of built-in parts with what turns each of them on. `components` builds and connects
them. A part of your own goes into `SalesGRPOTrainer(parts=[...])`.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.data.branches import Branches
from salesrl_trl.generation.sampler import Sampler
from salesrl_trl.kl.branched import BranchedKL
from salesrl_trl.launch.evaluation.quick_record import QuickEvalSettings
from salesrl_trl.reward.figures import RewardFigures
from salesrl_trl.reward.reward_loop import RewardLoop
from salesrl_trl.rollout.pipeline import Pipeline
from salesrl_trl.rollout.rollout_scoring import CompletedBatch, RolloutScoring
from salesrl_trl.telemetry.instruments import Instruments
from salesrl_trl.update.ledger import Ledger
from salesrl_trl.update.run_control import RunControl
from salesrl_trl.wiring.hooks import Hooks

if TYPE_CHECKING:
    from salesrl_trl.launch.evaluation.quick_figures import Figure


@dataclass(frozen=True, kw_only=True, slots=True)
class PartContext:
    """What a part may use of a trainer. TRL's own is behind `trl`."""

    args: SalesGRPOConfig
    trl: Hooks
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
    recorded_weights: Mapping[str, float]  # of several reward functions
    quick_eval: QuickEvalSettings | None
    parts: "Sequence[Part]"  # all of them, in their order


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
    quick_figures: "Sequence[Figure]" = ()
    """Further figures of quick evaluations."""

    def connect(self, run: PartContext) -> None:
        """The trainer is built, and the parts before this one are connected."""

    def begin(self, resumed: str | None, run_id: str) -> None:
        """`train` begins, from the checkpoint `resumed` if there is one. `run_id`: of the run, over its resumes."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Steps begin. `state`: what the checkpoint holds of this part; empty where there is none."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as values of JSON. Called on the main process alone."""
        return {}

    def on_batch(self, batch: CompletedBatch) -> Mapping[str, float]:
        """All rewards of a batch are in, of training or of an evaluation. Returns figures by `figure_names`, the same
        on all ranks."""
        return {}

    def after_step(self, step: int) -> None:
        """An optimizer step is logged, saved and evaluated. Called before the first step of a run too, and maybe twice
        for the last one."""

    def figures(self, mode: str) -> Mapping[str, float]:
        """Figures of a log line of `"train"` or `"eval"`: the same names each time, the same values on all ranks."""
        return {}

    def on_table(self, mode: str, step: int) -> None:
        """TRL has written its table of completions. Called on the main process alone."""

    def end_run(self) -> None:
        """A run is over, also by a failure, or another one begins: close its files. No collective."""

    def close(self) -> None:
        """The trainer is finished. No collective."""


def built_in(run: PartContext) -> list[Part]:
    """The parts that the settings ask for. Nothing is imported for the others."""
    args, names = run.args, run.reward_loop.reward.names
    wanted = {
        "judged.spending:Spending": run.reward_loop.reward.budget is not None,
        "parts.flops:FlopsCount": True,
        "parts.lookahead:LookaheadPart": bool(args.max_rollout_lookahead),
        "judged.meter_part:JudgeMeter": names.meter is not None,
        "record.recorder:RecorderPart": bool(args.record),
        "launch.evaluation.bbq_part:BBQPart": any(BBQ_COLUMN in columns for columns in _columns(run.trl.eval_dataset)),
        "launch.evaluation.held_out_part:HeldOutPart": True,
        "launch.evaluation.quick_part:QuickEvalPart": run.quick_eval is not None and bool(run.quick_eval.steps),
        "parts.trackers:TrackersPart": True,
        "parts.weight_change:WeightChangePart": True,
        "record.closing_report:ClosingReport": "tensorboard" in args.report_to,  # behind all that logs figures
    }
    parts = []
    for place, is_on in wanted.items():
        if is_on:
            module, _, kind = place.partition(":")
            parts.append(getattr(importlib.import_module(f"salesrl_trl.{module}"), kind)())
    return parts


BBQ_COLUMN = "stereotyped_groups"
"""Of rows of BBQ alone: an evaluation of them has BBQ's scores."""


def _columns(dataset: Any) -> list[Sequence[str]]:
    """The columns of each dataset of an evaluation."""
    datasets = dataset.values() if isinstance(dataset, dict) else [dataset]
    return [getattr(each, "column_names", None) or () for each in datasets]
