"""What quick evaluations are asked for: their settings, and the interface of a figure of your own."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from salesrl_trl.errors import ConfigError
from salesrl_trl.names import REWARD
from salesrl_trl.types import Answered

WORST_BRANCH = "worst_branch"
"""The lowest score of any branch: raise it so that no branch gets better at another one's cost."""
SCORE = "score"  # the mean reward of a branch's answers
BETA = "beta"  # the KL coefficient of a branch at the time of the evaluation. The trainer knows it, not the answers.
OWN_NAMES = (SCORE, "truncated", "length", "kl")
"""Of the package's figures, in the order of the record."""
TAKEN = frozenset({"rows", "scored", "seconds", BETA, REWARD, WORST_BRANCH, *OWN_NAMES})


@runtime_checkable
class Figure(Protocol):
    """One figure of a branch's answers. The same answers must give the same number on every rank."""

    @property
    def name(self) -> str:
        """In the record, in the line, and behind `quick_eval/<branch>/` on TensorBoard."""

    @property
    def form(self) -> str:
        """Python's format of the figure in the line: `".2f"`, `".0%"`."""

    def __call__(self, answers: Sequence[Answered]) -> float | None:
        """The figure of at least one answer; `None` if it could not be measured. If it selects the best policy, higher
        is better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickEvalSettings:
    """Settings of quick evaluations: `QuickEvalSettings(steps=20, best="worst_branch")`."""

    steps: int = 0
    """Optimizer steps from one to the next; 0 for none."""
    rows: int = 16
    """Held-out rows, spread evenly over the branches."""
    best: str | None = None
    """The figure that selects the best policy: `reward`, `worst_branch`, a branch's name or a figure's name. `None`
    keeps no policy."""
    figures: tuple[Figure, ...] = ()
    """Figures of your own, beside those of the package."""


def checked_figures(objects: Iterable[object], branches: Sequence[str] = ()) -> tuple[Figure, ...]:
    """Figures from objects and from classes, which are made without arguments. No figure may have a branch's name.
    Raises `ConfigError` if one is no figure, its name is no identifier or is taken, or its `form` is no format."""
    figures: list[Figure] = []
    taken = {*TAKEN, *branches}
    for item in objects:
        try:
            made = item() if isinstance(item, type) else item
            if not isinstance(made, Figure):
                raise TypeError("it lacks one of `name`, `form` and `__call__`")
            format(0.5, made.form)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"`quick_eval_figures` holds {item!r}: {error}. Expected a class that is made without arguments and "
                "has `name`, a `form` such as '.2f', and `__call__(answers)`."
            ) from error
        if not str(made.name).isidentifier() or made.name in taken:
            raise ConfigError(
                f"`quick_eval_figures`: {item!r} has the name {made.name!r}. Expected letters, digits and "
                f"underscores, and none of: {', '.join(sorted(taken))}. Give it another `name`."
            )
        taken.add(made.name)
        figures.append(made)
    return tuple(figures)
