"""How TensorBoard's "Custom Scalars" tab groups the figures.

Owns the layout alone. The tags are the metrics' names as transformers writes them, behind `train/`.
"""

import re
from collections.abc import Sequence
from typing import Any

from salesrl_trl.names import (
    BOUNDED,
    COMPUTE_RATIO,
    DATA_LOADING_RATIO,
    FAILURE_REASONS,
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
from salesrl_trl.types import Outcome


def custom_scalars(branches: Sequence[str], banded: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """Category to chart to its kind and tags, for `SummaryWriter.add_custom_scalars`.

    Args:
        branches (`Sequence[str]`):
            Branch names.
        banded (`Sequence[str]`):
            Of them, those whose KL has a band.
    """
    quick = ("score", "truncated", "length", "kl")
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
            "utilisation": _lines(MFU_MODEL, MFU_STEP, COMPUTE_RATIO, DATA_LOADING_RATIO),
            "memory": _lines(*MEMORY),
        },
        "Failures by reason": {
            "completions": ["Multiline", [f"^{_tag(FAILURE_REASONS)}"]],
            "outcomes": _lines(*map(outcome_of, Outcome), SKIPPED_UPDATE),
        },
    }  # fmt: skip


def _lines(*names: str) -> list[Any]:
    # the plugin reads a line's tags as regular expressions
    return ["Multiline", [f"^{re.escape(_tag(name))}$" for name in names]]


def _tag(name: str) -> str:
    return f"{TRAIN}{name}"
