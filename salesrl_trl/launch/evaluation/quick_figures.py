"""Figures of a quick evaluation: each turns the answers of a branch into a number with a name.

Owns the package's own figures; `config.quick_evaluations` has the interface. To add one, name its class in
`quick_eval_figures`. It then stands in the record, in the line, in the report and on TensorBoard, and
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

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from salesrl_trl.config.quick_evaluations import SCORE, Figure
from salesrl_trl.ground.row_statistics import mean
from salesrl_trl.types import Answered


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


def measure(figure: Figure, answers: Sequence[Answered]) -> float | None:
    """A figure of some answers; `None` without answers, or if the figure is not finite."""
    value = figure(answers) if answers else None
    return float(value) if value is not None and math.isfinite(value) else None
