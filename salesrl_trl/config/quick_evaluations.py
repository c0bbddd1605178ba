"""Settings of quick evaluations, and the interface for your own metrics."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from salesrl_trl.names import REWARD
from salesrl_trl.types import Answered

WORST_BRANCH = "worst_branch"
"""The lowest score of any branch: maximise it so that no branch improves at another's cost."""
SCORE = "score"  # the mean reward of a branch's answers
BETA = "beta"  # a branch's KL coefficient at the time of the evaluation, known to the trainer, not from answers
OWN_FIGURES = {SCORE: ".2f", "truncated": ".0%", "length": ".0f", "kl": ".3f"}
"""The built-in metrics in the order of the record, and their formats in the log line."""
TAKEN = frozenset({"rows", "scored", "seconds", BETA, REWARD, WORST_BRANCH, *OWN_FIGURES})


@runtime_checkable
class Figure(Protocol):
    """A metric of a branch's answers. The same answers must yield the same number on every rank."""

    @property
    def name(self) -> str:
        """Used in the record, the log line, and after `quick_eval/<branch>/` in TensorBoard."""

    @property
    def form(self) -> str:
        """Python format for the log line: `".2f"`, `".0%"`."""

    def __call__(self, answers: Sequence[Answered]) -> float | None:
        """The metric of at least one answer; `None` if it could not be measured. If it selects the best policy, higher
        is better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickEvalSettings:
    """Settings of quick evaluations: `QuickEvalSettings(steps=20, best="worst_branch")`."""

    steps: int = 0
    """Optimizer steps between evaluations; 0 for none."""
    rows: int = 16
    """Held-out rows, spread evenly over the branches."""
    best: str | None = None
    """The metric that selects the best policy: `reward`, `worst_branch`, or the name of a branch or metric. `None`
    keeps no policy."""
    figures: tuple[Figure, ...] = ()
    """Your own metrics, in addition to the built-in ones."""
