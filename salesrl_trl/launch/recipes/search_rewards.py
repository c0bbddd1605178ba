"""What `search.yaml` counts beside the judge's verdict: reward functions, and figures of its quick evaluations."""

from collections.abc import Sequence

from salesrl_trl import per_completion
from salesrl_trl.types import Answered

Messages = list[dict[str, str]]


@per_completion
async def searches(completion: Messages) -> float:
    """The results that the policy has read before it answered. Its weight is what one costs."""
    return float(sum(message["role"] == "tool" for message in completion))


@per_completion
async def found(completion: Messages, documents: list[str]) -> float | None:
    """1 if a search brought a document that answers, else 0. A row that needs none has no number."""
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
