"""Advice about settings of a recipe, from the figures of the services.

Owns the advice. Refuses to know rewards or completions: it sees counts and seconds.
"""

from collections.abc import Mapping
from typing import NamedTuple

from salesrl_trl.build.checks.reward import JUDGE
from salesrl_trl.config import RewardConfig
from salesrl_trl.names import Stage

NOTEWORTHY_SHARE = 0.05
"""From this share on, an oddity of a service is reported: it moves the mean of every second group of eight."""


def hints(
    services: Mapping[str, Mapping[str, int]], waits: Mapping[str, float], overdue: int, config: RewardConfig
) -> list[str]:
    """Advice for every service that had trouble, or else for the service that the steps waited for most.

    Args:
        services (`Mapping[str, Mapping[str, int]]`):
            By service, its traffic.
        waits (`Mapping[str, float]`):
            By service, the seconds that the steps waited for it.
        overdue (`int`):
            Completions that `reward_deadline_s` cut off.
    """
    found = [_too_late(overdue, config)] if overdue else []
    troubles = [f"{name}: {text}" for name, traffic in services.items() for text in trouble(name, traffic, config)]
    slowest = max(waits, key=lambda name: waits[name])
    if troubles or not waits[slowest]:
        return found + troubles
    return found + [f"{name}: {_speed(name, services[name], config)}" for name in services if name.startswith(slowest)]


def _too_late(count: int, config: RewardConfig) -> str:
    return (
        f"{count} completions were cut off by `reward_deadline_s` ({config.reward_deadline_s:g} s). Raise it if the "
        "services are merely slow, or let them take more calls at once."
    )


def trouble(service: str, traffic: Mapping[str, int], config: RewardConfig) -> list[str]:
    """The trouble that a service had, with advice."""
    found = []
    if traffic["overloads"]:
        relief = "larger quota, or more `judge_providers`," if service.startswith(JUDGE) else "larger service"
        found.append(
            f"turned {traffic['overloads']} requests away and takes about {traffic['slots']} calls at once. Only a "
            f"{relief} makes it faster."
        )
    if traffic["timeouts"]:
        found.append(
            f"{traffic['timeouts']} timeouts. Raise {limits_of(service, config).timeout} if the service is only slow."
        )
    if traffic["failures"] + traffic["held_back"] > NOTEWORTHY_SHARE * traffic["calls"]:
        found.append(
            f"{traffic['failures']} attempts failed and {traffic['held_back']} calls were held back after that. Mend "
            "it: `max_attempts` and `outage_patience_s` bridge short outages only."
        )
    return found


def _speed(service: str, traffic: Mapping[str, int], config: RewardConfig) -> str:
    limits, text = limits_of(service, config), "the steps waited for it most."
    if service == Stage.RAG_32B:
        text += " Each row waits once: `reference_cache` keeps its answers for later runs."
    if traffic["slots"] >= limits.cap:
        return f"{text} All {limits.cap} slots were in use: raise {limits.concurrency} if the service can take more."
    if traffic["slots"] > config.initial_concurrency:
        return f"{text} It took up to {traffic['slots']} calls at once: set `initial_concurrency` to this number."
    return f"{text} Its calls hardly queued: only a faster service makes the step shorter."


class Limits(NamedTuple):
    """The limit of one service, and the names of its settings."""

    cap: int
    concurrency: str
    timeout: str


def limits_of(service: str, config: RewardConfig) -> Limits:
    """The limit of a service, and the names of its settings."""
    if not service.startswith(JUDGE):
        return Limits(config.rag_max_concurrency, "`rag_max_concurrency`", "`rag_timeout_s`")
    for each in config.parsed_judge_providers():
        if service == f"{JUDGE}_{each.name}":
            cap = each.max_concurrency or config.judge_max_concurrency
            return Limits(cap, f"`max_concurrency` of {each.name}", f"`timeout_s` of {each.name}")
    return Limits(config.judge_max_concurrency, "`judge_max_concurrency`", "`judge_timeout_s`")
