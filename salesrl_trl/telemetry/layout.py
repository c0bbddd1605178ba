"""The groups of figures under TensorBoard's "Custom Scalars" tab.

Owns the layout alone. Its tags are names of figures, with the prefix `train/` of transformers.
"""

import re
from collections.abc import Sequence

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback

from salesrl_trl.names import (
    BOUNDED,
    COMPUTE_RATIO,
    DATA_LOADING_RATIO,
    DISK_READ,
    DISK_WRITE,
    FAILURE_REASONS,
    GPU_BUSY,
    JUDGE_SECONDS,
    LEFT_OUT,
    MEMORY,
    MFU_MODEL,
    MFU_STEP,
    REWARD_EXPOSED,
    REWARD_HIDDEN,
    REWARD_SECONDS,
    SKIPPED_UPDATE,
    STALENESS,
    STALENESS_MAX,
    STEP_SECONDS,
    TRAIN,
    Phase,
    beta_of,
    kl_of,
    outcome_of,
    quick_of,
    reference_of,
    reward_of,
    time_of,
)
from salesrl_trl.telemetry.trackers import spared
from salesrl_trl.types import Outcome

Chart = list[str | list[str]]
"""Kind of a chart, `"Multiline"` or `"Margin"`, and its tags."""


def custom_scalars(
    branches: Sequence[str], banded: Sequence[str], quick: Sequence[str]
) -> dict[str, dict[str, Chart]]:
    """The layout for `SummaryWriter.add_custom_scalars`: category, then title, then chart.

    Args:
        branches (`Sequence[str]`):
            Branch names.
        banded (`Sequence[str]`):
            Names of the branches whose KL has a band.
        quick (`Sequence[str]`):
            Names of the figures of quick evaluations. Empty if there are none.
    """
    return {
        "Rewards by branch": {
            "reward": _lines(*map(reward_of, branches)),
            "32B reference": _lines(*map(reference_of, branches)),
            **{f"quick evaluation: {what}": _lines(*(quick_of(each, what) for each in branches)) for what in quick},
        },
        "KL with band and beta": {
            **{
                f"KL of {branch}": ["Margin", [_tag(kl_of(branch)), _tag(kl_of(branch, "_low")),
                                               _tag(kl_of(branch, "_high"))]]
                for branch in banded
            },
            **{f"KL of {branch}": _lines(kl_of(branch)) for branch in branches if branch not in banded},
            "beta": _lines(*map(beta_of, branches)),
        },
        "Step time by phase": {
            "seconds": _lines(*map(time_of, Phase), STEP_SECONDS),
            "rewards": _lines(REWARD_SECONDS, REWARD_EXPOSED, REWARD_HIDDEN, JUDGE_SECONDS),
            "rollouts ahead": _lines(STALENESS, STALENESS_MAX),
            "importance ratios": _lines(LEFT_OUT, BOUNDED),
            "utilisation": _lines(MFU_MODEL, MFU_STEP, COMPUTE_RATIO, DATA_LOADING_RATIO, GPU_BUSY),
            "disks": _lines(DISK_READ, DISK_WRITE),
            "memory": _lines(*MEMORY),
        },
        "Failures by reason": {
            "completions": ["Multiline", [f"^{_tag(FAILURE_REASONS)}"]],
            "outcomes": _lines(*map(outcome_of, Outcome), SKIPPED_UPDATE),
        },
    }  # fmt: skip


def _lines(*names: str) -> Chart:
    # TensorBoard reads the tags of a "Multiline" chart as regular expressions
    return ["Multiline", [f"^{re.escape(_tag(name))}$" for name in names]]


def _tag(name: str) -> str:
    return f"{TRAIN}{name}"


class ScalarLayout(TrainerCallback):
    """Writes the layout for TensorBoard, if the run reports to it.

    Args:
        branches (`Sequence[str]`):
            Branch names.
        banded (`Sequence[str]`):
            Names of the branches whose KL has a band.
        quick (`Sequence[str]`):
            Names of the figures of quick evaluations.
        callbacks (`Sequence[TrainerCallback]`):
            Callbacks of the trainer. That of TensorBoard may be among them.
    """

    def __init__(
        self,
        branches: Sequence[str],
        banded: Sequence[str],
        quick: Sequence[str],
        callbacks: Sequence[TrainerCallback],
    ) -> None:
        self._layout = custom_scalars(branches, banded, quick)
        self._callbacks = callbacks

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        for callback in self._callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
                with spared("TensorBoard"):
                    callback.tb_writer.add_custom_scalars(self._layout)
