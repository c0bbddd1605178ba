"""Figures of a quick evaluation: each turns the answers of a branch into a number with a name.

Owns the protocol of a figure and the package's own figures. A figure of your own needs no change of the package: name
its class in `quick_eval_figures`. It then stands in the record, in the line, in the report and on TensorBoard, and
`quick_eval_best` may name it.

Example:

```python
class Questions:
    \"\"\"Share of answers with a question mark.\"\"\"

    name = "questions"
    form = ".0%"

    def __call__(self, answers):
        return sum("?" in answer.text for answer in answers) / len(answers)
```
"""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.evaluation.row_statistics import mean
from salesrl_trl.launch.evaluation.subject import Answered
from salesrl_trl.names import REWARD

WORST_BRANCH = "worst_branch"
"""The lowest score of any branch: raise it so that no branch gets better at another one's cost."""
SCORE = "score"  # the mean reward of a branch's answers
BETA = "beta"  # the KL coefficient of a branch at the time of the evaluation. The trainer knows it, not the answers.


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


@dataclass(frozen=True, slots=True)
class _Own:
    name: str
    form: str
    of: Callable[[Sequence[Answered]], float | None]

    def __call__(self, answers: Sequence[Answered]) -> float | None:
        return self.of(answers)


def mean_reward(answers: Iterable[Answered]) -> float | None:
    """Mean reward of the answers that could be scored; `None` without such answers."""
    return mean([answer.reward.value for answer in answers if answer.reward.value is not None])


def kl_per_token(answers: Iterable[Answered]) -> float | None:
    """KL to the reference policy along the greedy answers, in nats per token; `None` without a reference."""
    measured = [(answer.kl, answer.kl_tokens) for answer in answers if answer.kl is not None and answer.kl_tokens]
    return sum(kl for kl, _ in measured) / sum(tokens for _, tokens in measured) if measured else None


OWN_FIGURES: tuple[Figure, ...] = (
    _Own(SCORE, ".2f", mean_reward),
    _Own("truncated", ".0%", lambda answers: mean([answer.truncated for answer in answers])),
    _Own("length", ".0f", lambda answers: mean([answer.tokens for answer in answers])),
    _Own("kl", ".3f", kl_per_token),
)
"""In the order of the record."""
TAKEN = frozenset({"rows", "scored", "seconds", BETA, REWARD, WORST_BRANCH, *(figure.name for figure in OWN_FIGURES)})


def measure(figure: Figure, answers: Sequence[Answered]) -> float | None:
    """A figure of some answers; `None` without answers, or if the figure is not finite."""
    value = figure(answers) if answers else None
    return float(value) if value is not None and math.isfinite(value) else None


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
            inspect.signature(made).bind([])
        except TypeError as error:
            raise ConfigError(
                f"`quick_eval_figures` holds {item!r}: {error}. Expected a class that is made without arguments and "
                "has `name`, `form` and `__call__(answers)`: see `salesrl_trl.launch.evaluation.quick_figures`."
            ) from error
        if not str(made.name).isidentifier() or made.name in taken:
            raise ConfigError(
                f"`quick_eval_figures`: {item!r} has the name {made.name!r}. Expected letters, digits and "
                f"underscores, and none of: {', '.join(sorted(taken))}. Give it another `name`."
            )
        try:
            format(0.5, made.form)
        except ValueError:
            raise ConfigError(
                f"`quick_eval_figures`: {made.name!r} has the form {made.form!r}. Expected a format of Python for a "
                "number, such as '.2f' or '.0%'."
            ) from None
        taken.add(made.name)
        figures.append(made)
    return tuple(figures)
