"""Reward functions of `search.yaml` in addition to the judge, and metrics of its quick evaluations."""

from collections.abc import Sequence

from salesrl_trl import per_completion
from salesrl_trl.types import Answered

Messages = list[dict[str, str]]


@per_completion
async def searches(completion: Messages) -> float:
    """The number of search results read before the answer. Its weight is the cost of a search."""
    return float(sum(message["role"] == "tool" for message in completion))


@per_completion
async def found(completion: Messages, documents: list[str]) -> float | None:
    """1 if a search found an answering document, else 0. `None` for rows without such documents."""
    results = [message["content"] for message in completion if message["role"] == "tool"]
    return float(any(text in result for text in documents for result in results)) if documents else None


class MeanOfFunction:
    """The mean of a reward function over the greedy answers."""

    of = ""
    form = ".2f"

    def __call__(self, answers: Sequence[Answered]) -> float | None:
        numbers = [number for each in answers if (number := each.reward.by_function.get(self.of)) is not None]
        return sum(numbers) / len(numbers) if numbers else None


class Searches(MeanOfFunction):
    name = of = "searches"


class Found(MeanOfFunction):
    name = of = "found"
