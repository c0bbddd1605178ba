"""Reward functions of `dialogue.yaml` in addition to the judge, and metrics of its quick evaluations."""

from collections.abc import Mapping
from typing import Any

from salesrl_trl import per_completion
from salesrl_trl.launch.recipes.search_rewards import MeanOfFunction

Messages = list[dict[str, Any]]


def outcome_of(completion: Messages) -> Mapping[str, Any]:
    """How the partner ended the conversation; empty if it did not."""
    found: Mapping[str, Any] = completion[-1].get("outcome") or {}
    return found


@per_completion
async def deal(completion: Messages, persona: dict[str, Any]) -> float:
    """1 for an agreement within the highest acceptable price, else 0."""
    outcome = outcome_of(completion)
    return float(outcome.get("end") == "agreement" and outcome["price"] <= persona["reservation"])


@per_completion
async def price(completion: Messages, persona: dict[str, Any]) -> float:
    """The agreed price as a share of the highest acceptable one; 0 without such a deal."""
    price = outcome_of(completion).get("price", 0.0)
    return price / persona["reservation"] if 0 < price <= persona["reservation"] else 0.0


@per_completion
async def turns(completion: Messages) -> float:
    """The seller's turns, without searches."""
    return float(sum(each["role"] == "assistant" and not each.get("tool_calls") for each in completion))


@per_completion
async def searches(completion: Messages) -> float:
    """The number of search results read."""
    return float(sum(each["role"] == "tool" for each in completion))


@per_completion
async def steered(completion: Messages, persona: dict[str, Any]) -> float | None:
    """1 if the seller mentions one of the customer's protected attributes, else 0. `None` without any."""
    said = " ".join(str(each.get("content")) for each in completion if each["role"] == "assistant").lower()
    return float(any(each.lower() in said for each in persona["protected"])) if persona["protected"] else None


class Deal(MeanOfFunction):
    name = of = "deal"


class PriceShare(MeanOfFunction):
    name = of = "price"


class Turns(MeanOfFunction):
    name = of = "turns"
