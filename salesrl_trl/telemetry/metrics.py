"""Names of the metrics this package adds, and the sums behind them.

Owns the names (in one place, so that a dashboard can rely on them) and the way from per-completion outcomes to
figures. A metric keeps its sum and its count until it is logged, so that batches of unequal size weigh right.
"""

import math
from collections.abc import Sequence

import torch

from salesrl_trl.types import Outcome, Reward

OUTCOMES = (Outcome.OK, Outcome.INVALID_ACTION, Outcome.JUDGE_INVALID, Outcome.INFRA)
REWARD_SECONDS = "time/reward_s"
SKIPPED_UPDATE = "failures/skipped_update"
REFERENCE_MISSING = "failures/reference_missing"


def reward_of(branch: str) -> str:
    """Mean reward of a branch's scored completions."""
    return f"reward/{branch}"


def reference_of(branch: str) -> str:
    """Mean judge score of the frozen 32B answers beside a branch's scored completions."""
    return f"reference/{branch}"


def fraction_of(outcome: Outcome) -> str:
    """Share of completions that ended so: `actions/valid` for `ok` and what failed by its reason otherwise."""
    return f"outcome/{outcome.value}"


def metric_names(branches: Sequence[str]) -> tuple[str, ...]:
    """Every name `Means` logs, in a fixed order: the same keys on every rank at every step."""
    per_branch = [name(branch) for branch in branches for name in (reward_of, reference_of)]
    return (*per_branch, *(fraction_of(outcome) for outcome in OUTCOMES), REFERENCE_MISSING, SKIPPED_UPDATE,
            REWARD_SECONDS)  # fmt: skip


class Means:
    """Means over whatever was added since the last `flush`.

    Args:
        names (`Sequence[str]`):
            Every name there will be; `flush` returns exactly these.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._sums = dict.fromkeys(names, 0.0)
        self._counts = dict.fromkeys(names, 0.0)

    def add(self, name: str, total: float, count: float) -> None:
        """Add a sum over `count` items."""
        self._sums[name] += total
        self._counts[name] += count

    def flush(self) -> dict[str, float]:
        """The means, NaN where nothing was added; and start over."""
        means = {
            name: self._sums[name] / self._counts[name] if self._counts[name] else math.nan for name in self._sums
        }
        for name in self._sums:
            self._sums[name] = self._counts[name] = 0.0
        return means


def encode(rewards: Sequence[Reward], branch_ids: Sequence[int]) -> torch.Tensor:
    """Per-completion figures that travel between ranks.

    Returns:
        `torch.Tensor` of shape (B, 4), float64: branch id, index into `OUTCOMES`, value and reference score, the last
        two NaN where there is none.
    """
    rows = [
        (
            branch_id,
            OUTCOMES.index(reward.outcome),
            math.nan if reward.value is None else reward.value,
            _number(reward.components.get("reference")),
        )
        for reward, branch_id in zip(rewards, branch_ids, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)


def add_rewards(means: Means, table: torch.Tensor, branches: Sequence[str]) -> None:
    """Add a gathered table from `encode` to the means.

    Args:
        means (`Means`):
            Made with `metric_names(branches)`.
        table (`torch.Tensor`):
            Shape (world size x B, 4).
        branches (`Sequence[str]`):
            Branch names by id.
    """
    branch_ids, outcomes, values, references = table.unbind(dim=1)  # each (N,)
    for branch_id, branch in enumerate(branches):
        in_branch = branch_ids == branch_id
        for name, column in ((reward_of(branch), values), (reference_of(branch), references)):
            there = in_branch & ~torch.isnan(column)
            means.add(name, column[there].sum().item(), there.sum().item())
    for index, outcome in enumerate(OUTCOMES):
        means.add(fraction_of(outcome), (outcomes == index).sum().item(), len(table))
    judged = outcomes == OUTCOMES.index(Outcome.OK)
    means.add(REFERENCE_MISSING, (judged & torch.isnan(references)).sum().item(), max(judged.sum().item(), 1))


def _number(value: float | None) -> float:
    return math.nan if value is None else value
